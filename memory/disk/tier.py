"""The disk tier: cached blocks in files, written in the background and read ahead for waiting requests.

The engine's thread never waits for the disk: it hands out snapshots of host images to be written, and takes in images
that were read. A disk that is full, fails or hangs costs hits.

Tests: tests/core/test_prefix_tiers.py, tests/simulation
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..host.daemon_pool import DaemonPool
from ..pages.block import BASE_VERSION, Block, Key, Root
from .folder import BlockFile, BlockFolder, SealedBlock
from .keys import BASE, BlockKeys, owner_name
from .writer import BlockWriter, Pool

if TYPE_CHECKING:
    from ..host.budget import HostBudget
    from ..pages.eviction import RestoreCosts
    from ..pages.prefix import PrefixCache
    from ..transfers.cached_pages import CachedPages

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""The most seconds that a clean stop writes blocks."""

READERS = 2

TURN_BLOCKS = 16
"""Blocks of a run that a thread reads before other runs have their turn."""


class FileEvents(Protocol):
    """Is told which blocks are in files."""

    def describe(self, block: Block) -> Any:
        """Return what to tell of a block whose key is known; called on the engine's thread."""
        ...

    def in_file(self, about: Any) -> None:
        """Record a block that is in a file from now on; any thread may call it."""
        ...

    def found(self, keys: Sequence[bytes]) -> None:
        """Record blocks that were in files before; any thread may call it."""
        ...

    def gone(self, key: bytes) -> None:
        """Record that a block is in no file; any thread may call it."""
        ...


class PageBytes(Protocol):
    """The bytes of images of pages."""

    def new_image(self) -> Any:
        """Return an uninitialized image of a page; from any thread."""
        ...

    def bytes_of(self, image: Any) -> memoryview:
        """Return the bytes of an image of a page, to read or to change."""
        ...


@dataclass(eq=False)
class ReadAhead:
    """A run of blocks that is read for waiting requests: those after the blocks that the prefix cache knows."""

    version: int
    scope: tuple[str, str]
    changed_from: int
    tokens: list[tuple[Key, ...]]
    """Of each block."""
    files: list[BlockFile]
    parent: Block | None
    deadline: float
    """When to compute the tokens instead."""
    wanted_by: list[Callable[[], bool]]
    """Each returns False once its request has ended: then the adapter's version may be gone."""
    num_reserved: int
    found: dict[int, SealedBlock] = field(default_factory=dict)
    """What was read, by its index, until it is taken in."""
    futures: list[Future[None]] = field(default_factory=list)
    """Calls on reading threads, each of which reads the next few blocks."""
    indices: Iterator[int] = field(default_factory=itertools.count)
    end: int = field(init=False)
    """The index of the first block that could not be read."""
    num_taken: int = 0
    has_ended: bool = False
    num_pages: int = 0
    seconds: float = 0.0
    """Time that threads spent reading it; a step may notice the end much later."""

    def __post_init__(self) -> None:
        self.end = len(self.files)

    @property
    def is_over(self) -> bool:
        """True if all was taken in, or nothing more is wanted."""
        return self.has_ended or self.num_taken >= self.end


@dataclass(eq=False)
class DiskTier:
    """Blocks in a folder, by keys that cover all that their KV depends on."""

    folder: BlockFolder
    keys: BlockKeys
    pages: PageBytes
    host: CachedPages
    prefix: PrefixCache
    budget: HostBudget
    costs: RestoreCosts
    page_bytes: int
    content_of: Callable[[int], str | None]
    """Returns the content hash of a registered adapter version; None if that is not known."""
    parts_of: Callable[[int], Sequence[str]]
    """Returns the content hashes of what a registered version is composed of."""
    clock: Callable[[], float]
    wake: Callable[[], None] = lambda: None
    """Called when a read has ended, from its thread."""
    close_seconds: float = CLOSE_SECONDS
    """The most seconds that `close` waits for the disk."""
    turn_blocks: int = TURN_BLOCKS
    """See `TURN_BLOCKS`."""

    def __post_init__(self) -> None:
        self.writer = BlockWriter(self.folder, self.pages.bytes_of, self.page_bytes, self.budget.capacity_bytes)
        self._readers: Pool = DaemonPool("kv-read", READERS, 64)
        self._lock = threading.Lock()
        self._events: FileEvents | None = None
        self._jobs: dict[str, ReadAhead] = {}
        self._late: list[Future[None]] = []
        """Calls that still run though their run of blocks is over."""
        self._reserved_bytes = 0
        self.is_closed = False
        self.num_hit_tokens = 0
        self.read_seconds = 0.0
        self.budget.join(self)

    def use_pools(self, writer: Pool, readers: Pool) -> None:
        """Write and read on these threads; the writer runs one call after another."""
        self.writer.pool, self._readers = writer, readers

    @property
    def shared_name(self) -> str:
        """Equal for tiers that find each other's blocks: those of one folder and one identity."""
        return self.folder.seal_of(b"identity" + self.keys.identity).hex()[:32]

    # -- for the budget

    @property
    def num_bytes(self) -> int:
        """Host memory of blocks that wait to be written, or are being read."""
        return self.writer.num_bytes + self._reserved_bytes

    def is_loose(self, item: Hashable) -> bool:
        return False

    def drop(self, item: Hashable) -> None:
        """Nothing is offered."""

    # -- keys

    def file_of(self, block: Block) -> BlockFile | None:
        """Where a block's file lies; None while its adapter's content hash is not known."""
        digest = self._digest(block)
        version, scope = block.version, block.scope
        owner = self._owner(version)
        if digest is None or owner is None or not isinstance(scope, tuple):
            return None
        return BlockFile(self._folder_of(version, owner), self.folder.tenant(scope[0]), self.keys.name_of(digest))

    def _folder_of(self, version: int, owner: str) -> str:
        return BASE if version == BASE_VERSION else owner_name(owner, self.parts_of(version))

    def _owner(self, version: int) -> str | None:
        return BASE if version == BASE_VERSION else self.content_of(version)

    def _digest(self, block: Block) -> bytes | None:
        """The block's key; its ancestors' keys are computed first, and kept."""
        chain: list[Block] = []
        at: Block | None = block
        while at is not None and at.digest is None:
            chain.append(at)
            at = at.parent
        digest = None if at is None else at.digest
        for each in reversed(chain):
            digest = each.digest = self._digest_of_root(each) if isinstance(each, Root) else self._after(digest, each)
            if digest is None:
                break
        return digest

    def _digest_of_root(self, root: Root) -> bytes | None:
        owner = self._owner(root.version)
        return None if owner is None or not isinstance(root.scope, tuple) else self.keys.root(owner, root.scope)

    def _after(self, parent: bytes | None, block: Block) -> bytes | None:
        """A block's key after its parent's; None if that, or the content hash of its adapter, is not known."""
        if parent is None or (branch := block.branch) is None:
            return None if parent is None else self.keys.after(parent, block.tokens)
        owner = self._owner(branch.version)
        return None if owner is None else self.keys.after(parent, block.tokens, owner, branch.changed_from)

    # -- writing

    def save(self, block: Block) -> None:
        """Have a block with images written in the background, unless that was done, or too many wait."""
        state = block.checkpoint
        has_state = state is not None and bool(state.images)
        if block.written >= len(block.images) + has_state or not block.images:
            return
        groups = tuple(sorted(block.images))
        images = [block.images[group] for group in groups]
        accepted = 0
        if has_state and state is not None:
            images += state.images
            accepted = state.accepted
        sealed = SealedBlock(groups, len(images) - len(groups), accepted, images)
        if self.writer.has_room(len(images)) and self._write(block, sealed):
            block.written = len(groups) + has_state

    def _write(self, block: Block, sealed: SealedBlock) -> bool:
        """Write a block soon; False if it is not known where, or can't be."""
        if (file := self.file_of(block)) is None:
            return False
        return self.writer.add(file, sealed, self._teller(block))

    def wait(self, timeout: float = CLOSE_SECONDS) -> None:
        """Wait until what was given to be written or removed has been."""
        self.writer.wait(timeout)

    # -- reading

    def read_ahead(
        self,
        version: int,
        tokens: Sequence[Key],
        scope: tuple[str, str],
        changed_from: int,
        block_tokens: int,
        is_wanted: Callable[[], bool],
    ) -> ReadAhead | None:
        """Begin to read the blocks of a prompt that the cache does not know; None if that can't, or need not, be done.

        At least one token is left to compute.
        """
        known = self.prefix.walk(version, tokens, scope, changed_from)
        first, end = len(known), (len(tokens) - 1) // block_tokens
        files, runs = self._files(version, known, tokens, scope, changed_from, range(first, end), block_tokens)
        if not files:
            return None
        if (job := self._jobs.get(files[0].key)) is not None:
            job.wanted_by.append(is_wanted)
            return job
        per_block = self.prefix.num_groups
        num_bytes = len(files) * per_block * self.page_bytes
        seconds = len(files) * per_block * self.costs.prefix_page
        if len(files) * per_block * self.costs.disk_prefix_page > seconds:
            self.costs.doubt("disk_prefix_page")
            return None
        self.host.hold(known)  # else room is made of what the blocks are to come after
        has_room = self.budget.claim(num_bytes)
        self.host.let_go(known)
        if not has_room:
            return None
        now = self.clock()
        parent = known[-1] if known else None
        job = ReadAhead(version, scope, changed_from, runs, files, parent, now + seconds, [is_wanted], num_bytes)
        try:
            for _ in files[:READERS]:
                job.futures.append(self._readers.submit(self._read, job))
        except Exception as error:  # too many reads hang, or there is no thread
            logger.debug("fewer threads read cached blocks: %s", error)
        if not job.futures:
            return None
        self._reserved_bytes += num_bytes
        self._jobs[files[0].key] = job
        return job

    def _files(
        self,
        version: int,
        known: Sequence[Block],
        tokens: Sequence[Key],
        scope: tuple[str, str],
        changed_from: int,
        blocks: range,
        step: int,
    ) -> tuple[list[BlockFile], list[tuple[Key, ...]]]:
        """Places and tokens of the blocks of a prompt after the known ones; none if a content hash is not known."""
        owner = self._owner(version)
        if owner is None:
            return [], []
        acting = BASE if changed_from else owner
        digest = self._digest(known[-1]) if known else self.keys.root(acting, scope)
        if digest is None:
            return [], []
        files, runs, folder = list[BlockFile](), list[tuple[Key, ...]](), self._folder_of(version, owner)
        tenant = self.folder.tenant(scope[0])
        for index in blocks:
            start = index * step
            run = tuple(tokens[start : start + step])
            if changed_from and start <= changed_from < start + step:
                digest = self.keys.after(digest, run, owner, changed_from - start)
            else:
                digest = self.keys.after(digest, run)
            acting = folder if changed_from < start + step else BASE
            files.append(BlockFile(acting, tenant, self.keys.name_of(digest)))
            runs.append(run)
        return files, runs

    def _read(self, job: ReadAhead) -> None:
        """Read some blocks, until one is missing, and have the rest read in another turn; runs on reading threads."""
        try:
            while True:
                for at in itertools.islice(job.indices, self.turn_blocks):
                    if at >= job.end or job.has_ended or not self._read_block(job, at):
                        return
                try:
                    job.futures.append(self._readers.submit(self._read, job))
                    return
                except Exception as error:  # too many runs wait: this one goes on
                    logger.debug("a run of cached blocks has no other turn: %s", error)
        finally:
            self.wake()

    def _read_block(self, job: ReadAhead, at: int) -> bool:
        """Read one block; False, and the run ends before it, if there is none."""
        began, found = self.clock(), None
        try:
            found = self.folder.read(job.files[at], self._make)
        finally:
            with self._lock:
                if found is None:
                    job.end = min(job.end, at)
                else:
                    job.found[at] = found
                    job.num_pages += len(found.pages)
                    job.seconds += max(0.0, self.clock() - began)
        return found is not None

    def _make(self) -> tuple[Any, memoryview]:
        image = self.pages.new_image()
        return image, self.pages.bytes_of(image)

    def is_coming(self, job: ReadAhead) -> bool:
        """True while it is worth waiting for a read."""
        return not job.has_ended and self.clock() < job.deadline

    @property
    def is_reading(self) -> bool:
        """True while reads are in flight."""
        return bool(self._jobs)

    def _futures(self) -> list[Future[None]]:
        return [future for job in self._jobs.values() for future in job.futures]

    @property
    def reads(self) -> list[Future[None]]:
        """The reads in flight that are worth waiting for."""
        return [future for job in self._jobs.values() if self.is_coming(job) for future in job.futures]

    def advance(self) -> None:
        """Take in what was read; called between steps."""
        for key, job in list(self._jobs.items()):
            is_read = all(future.done() for future in job.futures)  # asked first: what was found is there then
            while not job.is_over and job.num_taken in job.found:
                self._take_in(job, job.found.pop(job.num_taken))
            if not (is_read or job.is_over):
                continue
            del self._jobs[key]
            job.has_ended = True
            self._late = [future for future in (*self._late, *job.futures) if not future.done()]
            self._reserved_bytes -= job.num_reserved
            self.read_seconds += job.seconds
            if job.num_pages:
                self.costs.observe("disk_prefix_page", job.seconds / job.num_pages)

    def _take_in(self, job: ReadAhead, found: SealedBlock) -> None:
        """Add a block that was read to the cache, with images alone."""
        at = job.num_taken
        job.num_taken += 1
        size = len(found.pages) * self.page_bytes
        job.num_reserved -= min(size, job.num_reserved)
        self._reserved_bytes -= min(size, self._reserved_bytes)
        count = len(found.groups)
        if not any(each() for each in job.wanted_by) or count > self.prefix.num_groups:
            job.has_ended = True
            return
        block = self.prefix.adopt(job.version, job.parent, job.tokens[at], job.scope, job.changed_from)
        if block is None:
            job.has_ended = True
            return
        images = dict(zip(found.groups, found.pages[:count], strict=True))
        if not self.host.adopt(block, images, found.pages[count:], found.accepted):
            job.has_ended = True
            return
        block.written = count + bool(found.num_state_pages)
        if self._events is not None and self._digest(block) is not None:
            self._teller(block)()
        job.parent = block
        self.num_hit_tokens += len(block.tokens)

    # -- what is in files

    def tell(self, events: FileEvents) -> Future[None] | None:
        """Tell of the blocks that are in files, soon, and of all changes; those of other servers are noticed late.

        Returns what waits for the former; None if there is no thread.
        """
        self._events = events
        self.folder.gone = self._tell_gone
        try:
            return self._readers.submit(self._tell_found, events)
        except Exception as error:
            logger.warning("subscribers are not told which blocks are in files: %s", error)
            return None

    def _teller(self, block: Block) -> Callable[[], None]:
        """Return what tells of a block, whose key is known, once it is in a file."""
        return _nothing if self._events is None else partial(self._events.in_file, self._events.describe(block))

    def _tell_gone(self, name: str) -> None:
        if self._events is not None and (key := self.keys.key_of(name)) is not None:
            self._events.gone(key)

    def _tell_found(self, events: FileEvents) -> None:
        """Runs on a reading thread."""
        try:
            self.folder.tell_names(
                lambda names: events.found([key for name in names if (key := self.keys.key_of(name)) is not None])
            )
        except OSError as error:
            logger.warning("subscribers are not told which blocks are in files: %s", error)

    def num_blocks(self, version: int) -> int:
        """Blocks of an adapter version, or of the base model, in files of this identity, as last seen."""
        owner = self._owner(version)
        if owner is None:
            return 0
        return self.folder.num_files.get((self._folder_of(version, owner), self.keys.mark), 0)

    # -- the end

    def close(self, copy_out: Callable[[int], Any] | None = None) -> None:
        """Write what is not in files yet, for at most `CLOSE_SECONDS`. copy_out: makes an image of a page."""
        if self.is_closed:
            return
        self.is_closed = True
        end = self.clock() + self.close_seconds
        for job in self._jobs.values():
            job.has_ended = True
        if copy_out is not None:
            self._save_the_rest(copy_out, end)
        while self.writer.is_writing and self.clock() < end:
            self.writer.let_write()
        self.writer.pool.shutdown()
        self._readers.shutdown()
        if not self.writer.is_writing and all(future.done() for future in (*self._late, *self._futures())):
            self.folder.close()  # else a thread that hangs still has it

    def _save_the_rest(self, copy_out: Callable[[int], Any], end: float) -> None:
        """Write the blocks that only the pool has, parents first."""
        found: list[Block] = list(self.prefix.roots())
        for block in found:
            found += block.children.values()
            while self.writer.is_writing and self.writer.is_half_full and self.clock() < end:
                self.writer.let_write()
            if self.clock() > end:
                return
            if block.parent is None:
                continue
            try:
                sealed = _all_of(block, copy_out)
            except Exception as error:
                logger.warning("a cached block is not written, as it could not be copied: %s", error)
                continue
            if sealed is not None:
                self._write(block, sealed)


def _nothing() -> None:
    """For subscribers that there are not."""


def _all_of(block: Block, copy_out: Callable[[int], Any]) -> SealedBlock | None:
    """All of a block's pages, and of its checkpoint's; None if they were given to be written."""
    groups = tuple(group for group, page in enumerate(block.pages) if page or group in block.images)
    state, state_images = block.checkpoint, list[Any]()
    if not groups or block.written >= len(groups) + (state is not None):
        return None
    images = [block.images[group] if group in block.images else copy_out(block.pages[group]) for group in groups]
    if state is not None:
        state_images = state.images or [copy_out(page) for page in state.pages]
    return SealedBlock(groups, len(state_images), 0 if state is None else state.accepted, images + state_images)
