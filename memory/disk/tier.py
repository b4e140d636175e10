"""The disk tier: cached blocks in files, written in the background and read ahead for waiting requests.

The engine's thread never waits for the disk: it hands out snapshots of host images to be written, and takes in images
that were read. A disk that is full, fails or hangs costs hits.

Tests: tests/core/test_prefix_tiers.py, tests/simulation
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..host.daemon_pool import DaemonPool
from ..pages.block import BASE_VERSION, Block, Key, Root
from .folder import BlockFile, BlockFolder, SealedBlock
from .keys import BASE, BlockKeys, owner_name
from .read_ahead import Prompt, ReadAhead, Reader
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

LOOK_SECONDS = 1.0
"""Seconds between two looks at the folder's size, which other servers change, too."""

_LOOKS = 8
"""Runs that wait for the content hash of their adapter, and let others begin before them."""

_PATHS = 8
"""Prompts whose beginnings are written at the same time."""


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


class Contents(Protocol):
    """Finds out content hashes."""

    pool: Pool
    """Runs what finds them."""

    @property
    def is_busy(self) -> bool:
        """True until `advance` has noted what is being found."""
        ...

    def learn(self, version: int) -> Future[Any] | None:
        """Begin to find out the content hash of a registered version; returns what does, until it is known."""
        ...

    def advance(self) -> None:
        """Note what was found."""
        ...

    def close(self) -> None:
        """Find out no more."""
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
    contents: Contents
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
        self._jobs: dict[tuple[int, str], ReadAhead] = {}
        """Runs that are read, by version and the name of their first file."""
        self._waiting = deque[ReadAhead]()
        """Runs that have not begun, in the order of their requests' arrival."""
        self._is_full = False
        """True if a run had to wait for room, and nothing has changed since."""
        self._done: list[ReadAhead] = []
        """Runs that were read for requests that still wait."""
        self._paths: dict[Block, list[Block]] = {}
        """By the block that leaves the pool next: those before it that are still to be written, the first one last."""
        self._late: list[Future[None]] = []
        """Calls that still run though their run of blocks is over."""
        self._reserved_bytes = 0
        self._looked = self.clock()
        self._looking: Future[None] | None = None
        self.is_closed = False
        self.num_hit_tokens = 0
        self.read_seconds = 0.0
        self.budget.join(self, keeps=self.writer.keeps)

    def use_pools(self, writer: Pool, readers: Pool) -> None:
        """Write, read and hash on these threads; the writer runs one call after another."""
        self.writer.pool, self._readers, self.contents.pool = writer, readers, readers

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
        """Have a block that has images written in the background, unless that was done."""
        if block.images and (sealed := _all_of(block, None)) is not None:
            self._write(block, sealed)

    def save_path(self, block: Block) -> None:
        """Have the blocks before one that leaves the pool written soon, from the root on: nothing is found in files
        without them, and they leave next.
        """
        if self.host.ahead is not None or block.parent is None:
            return  # a device's pages are not copied while a step waits
        path = self._paths.pop(block, None) or _unwritten_before(block)
        if path:
            self._paths[block.parent] = path
            if len(self._paths) > _PATHS:
                del self._paths[next(iter(self._paths))]

    def write_paths(self) -> None:
        """Copy blocks of the pool that are to be written, as far as there is room for them; called between steps."""
        for at, path in list(self._paths.items()):
            while path and (not _is_in_pool(path[-1]) or self._copy(path[-1])):
                path.pop()
            if not path:
                del self._paths[at]
            elif self.writer.is_half_full:
                return

    def _copy(self, block: Block) -> bool:
        """Have a block of the pool written; False if it is to be tried again."""
        if self.file_of(block) is None:
            return False
        if self.writer.spare_bytes < self.page_bytes * len(block.pages) or self.writer.is_half_full:
            return False
        try:
            sealed = _all_of(block, self.host.copy_of)
        except MemoryError:
            return False
        if sealed is not None:
            self._write(block, sealed, is_kept=True)
        return True

    def leaves(self, block: Block) -> None:
        """Have a block written whose images leave host memory, as far as there is room to keep them until then."""
        self.writer.leaves(block)
        if block.images and (sealed := _all_of(block, None)) is not None:
            self._write(block, sealed, is_kept=True)

    def let_go(self, block: Block) -> None:
        """Note that a block's images leave host memory."""
        self.writer.leaves(block)

    def _write(self, block: Block, sealed: SealedBlock, *, is_kept: bool = False) -> bool:
        """Write a block soon; False if it is not known where, or can't be."""
        if (file := self.file_of(block)) is None:
            return False
        return self.writer.add(file, block, sealed, self._teller(block), is_kept=is_kept)

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
        is_waiting: Callable[[], bool] | None = None,
    ) -> ReadAhead | None:
        """Begin to read the blocks of a prompt that the cache does not know, as soon as there is room for them; None if
        that can't, or need not, be done. is_wanted, is_waiting: see `Reader`; the latter is as the former by default.

        At least one token is left to compute.
        """
        prompt = Prompt(version, tokens, scope, changed_from, block_tokens)
        self.contents.advance()
        content = self.contents.learn(version)
        if not prompt.num_blocks:
            return None
        if content is None or self._owner(version) is not None or not self._has_adapters():
            content = None
        job = ReadAhead(prompt, [Reader(is_wanted, is_waiting or is_wanted)], content=content)
        if self._is_full or not self._begin(job):
            self._waiting.append(job)
        return self._lasting(job)

    def _has_adapters(self) -> bool:
        """True if any file seems to be of an adapter."""
        return any(owner != BASE and mark == self.keys.mark for owner, mark in list(self.folder.num_files))

    def _seconds(self, num_blocks: int) -> float:
        """What computing some blocks would take."""
        return num_blocks * self.prefix.num_groups * self.costs.prefix_page

    def _lasting(self, job: ReadAhead) -> ReadAhead | None:
        """A run, or the one that reads the same; None if there is nothing to wait for."""
        while job.instead is not None:
            job = job.instead
        return None if job.has_ended else job

    def _begin(self, job: ReadAhead) -> bool:
        """Begin to read a run, or end it if there is nothing to read; False if it has to wait."""
        if job.needs_content:
            return False
        if job.content is not None:  # its thread may have found it since results were noted
            self.contents.advance()
        about = job.prompt
        known = self.prefix.walk(about.version, about.tokens, about.scope, about.changed_from)
        count = self._num_readable(job, known)
        if count is None:
            return False
        files, runs = list[BlockFile](), list[tuple[Key, ...]]()
        if count:
            files, runs = self._files(about, known, range(len(known), len(known) + count))
        if not files:
            job.has_ended = True
            return True
        if (other := self._jobs.get((about.version, files[0].key))) is not None:
            other.readers += job.readers
            job.instead = other
            return True
        self._read_files(job, known, files, runs)
        return True

    def _num_readable(self, job: ReadAhead, known: Sequence[Block]) -> int | None:
        """How many of the blocks after the known ones to read; None: it is to be asked again once there is room."""
        count, per_block = job.prompt.num_blocks - len(known), self.prefix.num_groups
        if count <= 0 or not job.is_awaited:
            return 0
        if self.costs.disk_prefix_page > self.costs.prefix_page:
            self.costs.doubt("disk_prefix_page")
            return 0
        may_wait = bool(self._jobs or self._done or self.host.is_holding)
        self.host.hold(known)  # else room is made of what the blocks are to come after
        room = self.budget.room() // (per_block * self.page_bytes)
        self.host.let_go(known)
        if room < count and may_wait:
            self._is_full = True
            return None
        return min(count, room)  # the beginning of a prompt is of use without its end

    def _read_files(
        self, job: ReadAhead, known: list[Block], files: list[BlockFile], runs: list[tuple[Key, ...]]
    ) -> None:
        """Begin to read a run's blocks, or end it if no thread can."""
        num_bytes = len(files) * self.prefix.num_groups * self.page_bytes
        self.host.hold(known)
        has_room = self.budget.claim(num_bytes)
        self.host.let_go(known)
        if not has_room:
            job.has_ended = True
            return
        job.has_begun, job.files, job.tokens, job.end = True, files, runs, len(files)
        job.parent = known[-1] if known else None
        job.deadline = self.clock() + self._seconds(len(files))
        try:
            for _ in files[:READERS]:
                job.futures.append(self._readers.submit(self._read, job))
        except Exception as error:  # too many reads hang, or there is no thread
            logger.debug("fewer threads read cached blocks: %s", error)
        if not job.futures:
            job.has_ended = True
            return
        job.num_reserved = num_bytes
        self._reserved_bytes += num_bytes
        self._jobs[job.prompt.version, files[0].key] = job  # a version with the same content may go before another
        self._keep(job, known)

    def _keep(self, job: ReadAhead, blocks: Sequence[Block]) -> None:
        """Drop the images of blocks that a run's requests begin with last, until they begin."""
        if job.is_awaited:
            self.host.want(blocks)
            job.kept += blocks

    def _files(
        self, about: Prompt, known: Sequence[Block], blocks: range
    ) -> tuple[list[BlockFile], list[tuple[Key, ...]]]:
        """Places and tokens of the blocks of a prompt after the known ones; none if a content hash is not known."""
        version, scope, changed_from, step = about.version, about.scope, about.changed_from, about.block_tokens
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
            run = tuple(about.tokens[start : start + step])
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
            found = self.writer.find(job.files[at]) or self.folder.read(job.files[at], self._make)
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
        """True while it is worth waiting for a read. A run that waits begins now if it can: its request is next."""
        if (found := self._lasting(job)) is None:
            return False
        if not found.has_begun:
            return self._may_come(found)
        return found.deadline is None or self.clock() < found.deadline

    def _may_come(self, job: ReadAhead) -> bool:
        """The same, of a run that has not begun."""
        if job.needs_content:
            if job.learn_until is None:
                job.learn_until = self.clock() + self._seconds(job.prompt.num_blocks)
            return self.clock() < job.learn_until
        if self._is_full and self._is_awaited:
            return True  # another one is before it
        if job.deadline is None:
            job.deadline = self.clock() + self._seconds(job.prompt.num_blocks)
        elif self.clock() >= job.deadline:
            return False
        self._end_done()
        while not self._begin(job):
            if self._is_awaited:
                return True
            if not self._put_back():
                return False
        self._waiting.remove(job)
        return self._lasting(job) is not None

    def _put_back(self) -> bool:
        """Let images be dropped that were read for a request which is not next, and read them again later; False if
        there are none, or all were read twice.
        """
        job = next((each for each in reversed(self._done) if not each.is_second), None)
        if job is None:
            return False
        self._done.remove(job)
        self.host.unwant(job.kept)
        job.kept.clear()
        job.instead = ReadAhead(job.prompt, job.readers, is_second=True)
        self._waiting.append(job.instead)
        return True

    @property
    def _is_awaited(self) -> bool:
        """True while some read is worth waiting for, and may leave room for others."""
        return any(map(self.is_coming, self._jobs.values()))

    def may_begin(self, job: ReadAhead) -> bool:
        """True for a run that may still be read, though it was not worth waiting for it so far."""
        found = self._lasting(job)
        return bool(job.kept) or (found is not None and not found.has_begun)

    @property
    def is_busy(self) -> bool:
        """True while `advance` has something to do."""
        return bool(self._jobs or self._waiting or self._done or self._paths or self.contents.is_busy)

    def _futures(self) -> list[Future[None]]:
        return [future for job in self._jobs.values() for future in job.futures]

    @property
    def reads(self) -> list[Future[Any]]:
        """The calls in flight that a request may wait for; it was held back, so the clock is not asked again."""
        contents = [job.content for job in self._waiting if job.content is not None and job.needs_content]
        return contents + self._futures()

    def advance(self) -> None:
        """Take in what was read; called between steps."""
        self.contents.advance()
        for key, job in list(self._jobs.items()):
            is_read = all(future.done() for future in job.futures)  # asked first: what was found is there then
            while not job.is_over and job.num_taken in job.found:
                self._take_in(job, job.found.pop(job.num_taken))
            if is_read or job.is_over:
                self._end_read(key, job)
        self._end_done()
        self.write_paths()
        for job in [*itertools.islice(self._waiting, _LOOKS)]:
            if self._is_full:
                break
            if self._begin(job):
                self._waiting.remove(job)

    def _end_read(self, key: tuple[int, str], job: ReadAhead) -> None:
        """Take in no more of a run."""
        del self._jobs[key]
        job.has_ended = True
        self._done.append(job)
        self._late = [future for future in (*self._late, *job.futures) if not future.done()]
        self._reserved_bytes -= job.num_reserved
        self.read_seconds += job.seconds
        if job.num_pages:
            self.costs.observe("disk_prefix_page", job.seconds / job.num_pages)
        self._is_full = False

    def _end_done(self) -> None:
        """Let images of blocks be dropped that no request waits for any more."""
        ended = [job for job in self._done if not job.is_awaited]
        for job in ended:
            self._done.remove(job)
            self.host.unwant(job.kept)
            job.kept.clear()
        if ended or not (self._jobs or self._done):
            self._is_full = False

    def _take_in(self, job: ReadAhead, found: SealedBlock) -> None:
        """Add a block that was read to the cache, with images alone."""
        at = job.num_taken
        job.num_taken += 1
        size = len(found.pages) * self.page_bytes
        if size > job.num_reserved:  # a checkpoint's pages come on top
            self.budget.claim(size - job.num_reserved)
        job.num_reserved -= min(size, job.num_reserved)
        self._reserved_bytes -= min(size, self._reserved_bytes)
        count = len(found.groups)
        about = job.prompt
        if not job.is_wanted or count > self.prefix.num_groups:
            job.has_ended = True
            return
        block = self.prefix.adopt(about.version, job.parent, job.tokens[at], about.scope, about.changed_from)
        if block is None:
            job.has_ended = True
            return
        images = dict(zip(found.groups, found.pages[:count], strict=True))
        if not self.host.adopt(block, images, found.pages[count:], found.accepted):
            job.has_ended = True
            return
        block.written = count + bool(found.num_state_pages)
        self._keep(job, [block])
        if self._events is not None and self._digest(block) is not None:
            self._teller(block)()
        job.parent = block
        self.num_hit_tokens += len(block.tokens)

    # -- what is in files

    def look(self) -> None:
        """Have the folder's size looked up, soon and now and then."""
        if self.is_closed or self.clock() < self._looked + LOOK_SECONDS:
            return
        if self._looking is None or self._looking.done():
            self._looked = self.clock()
            with suppress(Exception):  # too many reads wait
                self._looking = self._readers.submit(self.folder.look)

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
        for job in (*self._jobs.values(), *self._waiting):
            job.has_ended = True
        self._waiting.clear()
        if copy_out is not None:
            self._save_the_rest(copy_out, end)
        while self.writer.is_writing and self.clock() < end:
            self.writer.let_write()
        self.writer.pool.shutdown()
        self.contents.close()
        self._readers.shutdown()
        under_way = [*self._late, *self._futures(), *([self._looking] if self._looking else [])]
        if not self.writer.is_writing and all(future.done() for future in under_way):
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
                logger.debug("a cached block is not written, as it could not be copied: %s", error)  # `host` warns
                continue
            if sealed is not None:
                self._write(block, sealed, is_kept=True)


def _nothing() -> None:
    """For subscribers that there are not."""


def _is_in_pool(block: Block) -> bool:
    """True for a block that is still to be copied from the pool."""
    return not block.written and block.is_known and block.is_resident


def _unwritten_before(block: Block) -> list[Block]:
    """The blocks before one that are not written yet, the first one last. They end where one is written."""
    found, at = list[Block](), block.parent
    while at is not None and at.parent is not None and not at.written:
        found.append(at)
        at = at.parent
    return found


def _all_of(block: Block, copy_out: Callable[[int], Any] | None) -> SealedBlock | None:
    """A block's pages, and its checkpoint's; None if they were given to be written. copy_out: makes an image of a page;
    None: only what there are images of.
    """
    groups = tuple(group for group, page in enumerate(block.pages) if (page and copy_out) or group in block.images)
    state, state_images = block.checkpoint, list[Any]()
    if state is not None and not (state.images or (state.pages and copy_out)):
        state = None
    if not groups or block.written >= len(groups) + (state is not None):
        return None
    images = [_image_of(block, group, copy_out) for group in groups]
    if state is not None:
        state_images = state.images or [copy_out(page) for page in state.pages if copy_out]
    return SealedBlock(groups, len(state_images), 0 if state is None else state.accepted, images + state_images)


def _image_of(block: Block, group: int, copy_out: Callable[[int], Any] | None) -> Any:
    if group in block.images or copy_out is None:
        return block.images[group]
    return copy_out(block.pages[group])
