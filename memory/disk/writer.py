"""The thread that writes cached blocks to files and removes them.

Tests: tests/core/test_prefix_tiers.py, tests/simulation
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from ..host.daemon_pool import DaemonPool
from .folder import BlockFile, BlockFolder, SealedBlock
from .keys import is_of

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
"""Bytes of blocks that wait to be written, at most an eighth of host memory's budget. More are not written until they
leave host memory."""

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


class BlockWriter:
    """Blocks that wait to be written, in turn with removals; the engine's thread never waits for the disk."""

    def __init__(
        self, folder: BlockFolder, bytes_of: Callable[[Any], memoryview], page_bytes: int, host_bytes: int
    ) -> None:
        """bytes_of: returns those of an image of a page. host_bytes: host memory's budget."""
        self._folder, self._bytes_of, self._page_bytes = folder, bytes_of, page_bytes
        self._most_bytes = min(QUEUE_BYTES, host_bytes // 8)
        self.pool: Pool = DaemonPool("kv-write", 1, 1 << 20)
        """Runs one call after another."""
        self.num_bytes = 0
        """Host memory of blocks that wait."""
        self._lock = threading.Lock()
        self._queue: deque[tuple[BlockFile, SealedBlock, Callable[[], None]]] = deque()
        self._writing: Future[None] | None = None
        self.is_writing = False
        """Set and unset under the lock, so that no block waits while nothing is written."""
        self._removed: set[str] = set()

    def has_room(self, num_pages: int) -> bool:
        """True if a block of so many pages may wait beside the others."""
        return self.num_bytes + num_pages * self._page_bytes <= self._most_bytes

    def add(self, file: BlockFile, block: SealedBlock, tell: Callable[[], None]) -> bool:
        """Write a block soon; False if there is no thread. tell: called once it is in its file."""
        with self._lock:
            self._queue.append((file, block, tell))
            self.num_bytes += len(block.pages) * self._page_bytes
            starts, self.is_writing = not self.is_writing, True
        if starts:
            try:
                self._writing = self.pool.submit(self.write_all)
            except Exception as error:
                logger.warning("cached KV is not written: %s", error)
                with self._lock:
                    self._queue.clear()
                    self.num_bytes, self.is_writing = 0, False
                return False
        return True

    def write_all(self) -> None:
        """Write what waits; runs on the writing thread."""
        while True:
            with self._lock:
                if not self._queue:
                    self.is_writing = False
                    return
                file, block, tell = self._queue.popleft()
                is_removed = any(is_of(file.owner, content) for content in self._removed)
            try:
                if is_removed:
                    continue
                if self._folder.has(file, block):
                    tell()
                else:
                    self._folder.write(file, block, [self._bytes_of(image) for image in block.pages], tell)
            except Exception:
                logger.exception("a cached block was not written")
            finally:
                with self._lock:
                    self.num_bytes -= len(block.pages) * self._page_bytes

    def remove_owner(self, content_hash: str) -> Future[int]:
        """Remove blocks of an adapter and of its compositions, also those that wait, soon."""
        with self._lock:
            self._removed.add(content_hash)
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
        with self._lock:
            self.num_bytes -= sum(len(block.pages) for _, block, _ in self._queue) * self._page_bytes
            self._queue.clear()
        return self.pool.submit(self._folder.clear)

    def wait(self, timeout: float) -> None:
        """Wait until what was given to be written or removed has been."""
        if (writing := self._writing) is not None:
            writing.result(timeout)
        self.pool.submit(lambda: None).result(timeout)

    @property
    def is_half_full(self) -> bool:
        return self.num_bytes > self._most_bytes // 2

    def let_write(self) -> None:
        """Wait for a moment while blocks are written."""
        if (writing := self._writing) is not None:
            self.pool.wait([writing], _LOOK_SECONDS)
