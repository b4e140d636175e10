"""The thread that writes cached blocks to files and removes them.

Tests: tests/core/test_prefix_tiers.py, tests/simulation
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..host.daemon_pool import DaemonPool
from ..host.fault_log import FaultLog
from .folder import BlockFile, BlockFolder, SealedBlock
from .keys import is_of

if TYPE_CHECKING:
    from ..pages.block import Block

logger = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20
"""Bytes of blocks that have left host memory and are still to be written, at most an eighth of its budget."""

TURN_BLOCKS = 64
"""Blocks that are written before removals have their turn."""

_THREAD, _BLOCKS = "the thread that writes cached KV", "writing cached blocks"

_LOOK_SECONDS = 0.005
"""Seconds between two looks at what is being written, at a clean stop."""


class Pool(Protocol):
    """Runs calls beside the engine's thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a call soon. Raises an error if it can't be run."""
        ...

    def wait(self, futures: Sequence[Future[Any]], timeout: float) -> None:
        """Wait until one of some calls has ended, at most `timeout` seconds."""
        ...

    def shutdown(self) -> None:
        """Begin no further call."""
        ...


@dataclass(eq=False, slots=True)
class _Entry:
    """A block that waits to be written, or is being written."""

    file: BlockFile
    block: Block
    sealed: SealedBlock
    tell: Callable[[], None]
    is_kept: bool = False
    """True if its images are no longer host memory's: then they count here."""
    is_lost: bool = False
    """True once it is not to be written any more."""


_NOTHING = SealedBlock((), 0, 0, [])

_Heap = list[tuple[int, int, _Entry]]


def _pushed(heap: _Heap, depth: int, serial: int, entry: _Entry, count: int) -> _Heap:
    """A heap with one more entry, without those that have ended once they are most of it. count: that have not."""
    if len(heap) > 64 + 4 * count:
        heap = [each for each in heap if each[-1].sealed is not _NOTHING]
        heapq.heapify(heap)
    heapq.heappush(heap, (depth, serial, entry))
    return heap


class BlockWriter:
    """Blocks that wait to be written, in turn with removals; the engine's thread never waits for the disk.

    A block waits while host memory has its images, at no cost: it is written ahead of its eviction from there. Blocks
    nearest to the root are written first, so where time is short a prompt loses its tail. Images of a block that leaves
    host memory before it was written are kept here, as far as there is room; the deepest blocks lose theirs first.
    """

    def __init__(
        self, folder: BlockFolder, bytes_of: Callable[[Any], memoryview], page_bytes: int, host_bytes: int
    ) -> None:
        """bytes_of: returns those of an image of a page. host_bytes: host memory's budget."""
        self._folder, self._bytes_of, self._page_bytes = folder, bytes_of, page_bytes
        self._most_bytes = min(KEPT_BYTES, host_bytes // 8)
        self.pool: Pool = DaemonPool("kv-write", 1, 1 << 20)
        """Runs one call after another."""
        self.num_bytes = 0
        """Bytes of images that are kept here."""
        self._host_bytes = 0  # of images that wait and are host memory's
        self._lock = threading.Lock()
        self._entries: dict[Block, _Entry] = {}
        self._by_key: dict[str, _Entry] = {}
        self._queue: _Heap = []
        """A heap by depth, then age; entries that are lost stay in it until their turn."""
        self._kept: _Heap = []
        """A heap of kept entries, the deepest first; those that are no longer kept stay in it until their turn."""
        self._serials = itertools.count()
        self._writing: Future[None] | None = None
        self.is_writing = False
        """Set and unset under the lock, so that no block waits while nothing is written."""
        self._removed: set[str] = set()
        self._faults = FaultLog(logger)

    @property
    def spare_bytes(self) -> int:
        """Bytes that blocks which leave host memory may still take here."""
        return max(0, self._most_bytes - self.num_bytes)

    def keeps(self) -> int:
        """Bytes that would be kept here if host memory dropped all it has."""
        return min(self.spare_bytes, self._host_bytes)

    def add(
        self, file: BlockFile, block: Block, sealed: SealedBlock, tell: Callable[[], None], *, is_kept: bool = False
    ) -> bool:
        """Write a block soon; False if there is no thread, or no room. tell: called once it is in its file. is_kept:
        host memory does not have its images.
        """
        with self._lock:
            if (before := self._entries.get(block)) is not None:
                self._lose(before)
            entry = _Entry(file, block, sealed, tell)
            if not is_kept:
                self._host_bytes += self._size(entry)
            elif not self._keep(entry):
                return False
            block.written = len(sealed.groups) + bool(sealed.num_state_pages)
            self._entries[block] = self._by_key[file.key] = entry
            self._queue = _pushed(self._queue, block.depth, next(self._serials), entry, len(self._entries))
            starts, self.is_writing = not self.is_writing, True
        if starts:
            try:
                self._writing = self.pool.submit(self.write_all)
                self._faults.worked(_THREAD)
            except Exception as error:
                self._faults.failed(_THREAD, str(error), f"cached KV is not written: {error}")
                self.forget_all()
                with self._lock:
                    self.is_writing = False
                return False
        return True

    def leaves(self, block: Block) -> None:
        """Keep the images of a block that waits, if there is room: host memory is about to drop them."""
        with self._lock:
            entry = self._entries.get(block)
            if entry is None or entry.is_kept:
                return
            if self._keep(entry):
                self._host_bytes -= self._size(entry)
            else:
                self._lose(entry)

    def find(self, file: BlockFile) -> SealedBlock | None:
        """A block that waits to be written, or is being written; any thread may ask."""
        with self._lock:
            entry = self._by_key.get(file.key)
            return None if entry is None or entry.file != file else entry.sealed

    def forget_all(self) -> None:
        """Write nothing of what waits."""
        with self._lock:
            for entry in list(self._entries.values()):
                self._lose(entry)

    def write_all(self) -> None:
        """Write what waits, in turn with removals; runs on the writing thread."""
        while self._write_some():
            try:
                self._writing = self.pool.submit(self.write_all)
                return
            except Exception as error:  # the pool takes no more calls: this one goes on
                logger.debug("what waits to be written has no other turn: %s", error)

    def _write_some(self) -> bool:
        """Write a turn's blocks; False if nothing waits any more."""
        for _ in range(TURN_BLOCKS):
            if (found := self._next()) is None:
                return False
            (entry, sealed), is_written = found, False
            try:
                is_written = self._write(entry, sealed)
                self._faults.worked(_BLOCKS)
            except Exception as error:
                about = f"a cached block was not written: {type(error).__name__}: {error}"
                self._faults.failed(_BLOCKS, type(error).__name__, about)
            finally:
                with self._lock:
                    if not is_written and not entry.is_lost:
                        entry.block.written = 0  # it is given again when it leaves host memory
                    self._end(entry)
        return True

    def _next(self) -> tuple[_Entry, SealedBlock] | None:
        with self._lock:
            while self._queue:
                entry = heapq.heappop(self._queue)[-1]
                if entry.is_lost:
                    continue
                if any(is_of(entry.file.owner, content) for content in self._removed):
                    self._lose(entry)
                    continue
                return entry, entry.sealed
            self.is_writing = False
            return None

    def _write(self, entry: _Entry, sealed: SealedBlock) -> bool:
        if self._folder.has(entry.file, sealed):
            entry.tell()
            return True
        data = [self._bytes_of(image) for image in sealed.pages]
        return self._folder.write(entry.file, sealed, data, entry.tell)

    # -- the caller holds the lock

    def _size(self, entry: _Entry) -> int:
        return len(entry.sealed.pages) * self._page_bytes

    def _keep(self, entry: _Entry) -> bool:
        """Keep the images of an entry, in place of those of deeper blocks; False if there is no room for them: nothing
        is changed then but that deeper blocks are lost.
        """
        size = self._size(entry)
        while self.num_bytes and self.num_bytes + size > self._most_bytes:  # one always may
            deepest = self._deepest()
            if deepest is None or deepest.block.depth <= entry.block.depth:
                return False
            self._lose(deepest)
        entry.is_kept = True
        self.num_bytes += size
        self._kept = _pushed(self._kept, -entry.block.depth, next(self._serials), entry, len(self._entries))
        return True

    def _deepest(self) -> _Entry | None:
        """The deepest block that is kept."""
        while self._kept and not self._kept[0][-1].is_kept:
            heapq.heappop(self._kept)
        return self._kept[0][-1] if self._kept else None

    def _lose(self, entry: _Entry) -> None:
        """Don't write an entry; one that is being written ends as if it were."""
        if not entry.is_lost:
            entry.is_lost, entry.block.written = True, 0
            self._end(entry)

    def _end(self, entry: _Entry) -> None:
        """Let go of an entry's images, once."""
        if entry.sealed is _NOTHING:
            return
        if self._entries.get(entry.block) is entry:
            del self._entries[entry.block]
        if self._by_key.get(entry.file.key) is entry:
            del self._by_key[entry.file.key]
        if entry.is_kept:
            entry.is_kept = False
            self.num_bytes -= self._size(entry)
        else:
            self._host_bytes -= self._size(entry)
        entry.sealed = _NOTHING  # a heap may hold the entry for long

    def remove_owner(self, content_hash: str) -> Future[int]:
        """Remove blocks of an adapter and of its compositions, also those that wait, soon."""
        with self._lock:
            self._removed.add(content_hash)
            for entry in [each for each in self._entries.values() if is_of(each.file.owner, content_hash)]:
                self._lose(entry)
        return self.pool.submit(self._remove_owner, content_hash)

    def _remove_owner(self, content_hash: str) -> int:
        """Runs on the writing thread, after what was being written."""
        try:
            return self._folder.remove_owner(content_hash)
        finally:
            with self._lock:
                self._removed.discard(content_hash)

    def clear(self) -> Future[int]:
        """Remove all blocks, also those that wait, soon."""
        self.forget_all()
        return self.pool.submit(self._folder.clear)

    def wait(self, timeout: float) -> None:
        """Wait until what was given to be written or removed has been."""
        end = time.monotonic() + timeout
        while (writing := self._writing) is not None and (self.is_writing or not writing.done()):
            writing.result(end - time.monotonic())
        self.pool.submit(lambda: None).result(end - time.monotonic())

    @property
    def is_half_full(self) -> bool:
        return self.num_bytes > self._most_bytes // 2

    def let_write(self) -> None:
        """Wait for a moment while blocks are written."""
        if (writing := self._writing) is not None:
            self.pool.wait([writing], _LOOK_SECONDS)
