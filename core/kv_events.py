"""KV events: which blocks entered and left the prefix cache, on their way to the thread that publishes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..memory.adapters.adapter import Adapter
from ..memory.adapters.store import AdapterStore
from ..memory.disk.keys import BlockKeys
from ..memory.pages.block import BASE_VERSION, Block, Key, Medium, Root

MAX_EVENTS = 1 << 17
"""Events that wait to be published. They take some 50 MB, and a step of 1,024 tokens brings 64 of them."""


class Stored(NamedTuple):
    """A block that is in a medium from now on. parent: its parent's number, None for the first of a prompt.

    adapter, version, content_hash: of the adapter that it was computed with, None and 0 for the base model. An
    adapter's hash is always known: until it is, its blocks are not told of. changed_from: index of the first of its
    tokens that the adapter changes, if its parent is the base model's; None otherwise.
    scope: the tenant and salt that share it.
    """

    number: int
    parent: int | None
    tokens: tuple[Key, ...]
    adapter: str | None
    version: int
    content_hash: str | None
    scope: tuple[str, str]
    changed_from: int | None = None
    medium: Medium = Medium.POOL


class Removed(NamedTuple):
    """A block, by its number, that left the page pool, host memory or the disk."""

    number: int
    medium: Medium = Medium.POOL


class InFile(NamedTuple):
    """A block that is in a file from now on: by its key, as files outlive numbers. parent: its parent's key.

    adapter, version: of the adapter that it was computed with, None and 0 for the base model.
    """

    key: bytes
    parent: bytes | None
    tokens: tuple[Key, ...]
    adapter: str | None
    version: int


class Found(NamedTuple):
    """Keys of blocks that were in files before this process; the rest is not known until they are read."""

    keys: tuple[bytes, ...]


class Gone(NamedTuple):
    """Key of a block whose file is not there, whether it ever was or not."""

    key: bytes


Event = Stored | Removed | InFile | Found | Gone

MAX_FOUND = 1024
"""Keys in one `Found`."""

_Recorded = tuple[Block, Adapter | None, Hashable, Medium]
"""A block, its adapter, its scope and its medium."""


class KvEvents:
    """Events between two threads: the engine's adds them and never waits, the publisher's takes them.

    When the publisher lags by `most` events, further ones are dropped until it has taken all. So the publisher gets
    gapless sequences, with each loss between two of them reported.

    A block's hash must identify its content, hence blocks of an adapter are held until its content hash is known. A
    held block that is forgotten is never told of.

    Threads of the disk tier add events, too.
    """

    def __init__(self, store: AdapterStore, most: int = MAX_EVENTS, keys: BlockKeys | None = None) -> None:
        """keys: make the keys of blocks in files; None if prefixes are not kept in files."""
        self._store = store
        self._most = most
        self.keys = keys
        self._events: deque[_Recorded | Removed] = deque()
        self._of_files: deque[InFile | Found | Gone] = deque()
        self._is_losing = False
        self._adapters: dict[int, Adapter] = {}  # by version
        self._held: dict[
            Removed, _Recorded
        ] = {}  # by number and medium, in order: blocks of adapters without a content hash
        self._num_recorded = self._num_dropped = 0
        self._counting = threading.Lock()  # held for an append at most: the disk tier has several threads
        self._num_of_files = self._num_dropped_of_files = 0

    @property
    def num_recorded(self) -> int:
        return self._num_recorded + self._num_of_files

    @property
    def num_dropped(self) -> int:
        return self._num_dropped + self._num_dropped_of_files

    # --- the engine's thread ---

    def stored(self, version: int, scope: Hashable, block: Block, medium: Medium) -> None:
        """Record a block that is in a medium from now on, after its parent."""
        if self._has_room():
            adapter = None if version == BASE_VERSION else self._adapter(version)
            # a block's number, parent and tokens never change: they are read later, in the publisher's thread
            self._events.append((block, adapter, scope, medium))

    def removed(self, number: int, medium: Medium) -> None:
        """Record that a block left the page pool, host memory or the disk."""
        if self._has_room():
            self._events.append(Removed(number, medium))

    def describe(self, block: Block) -> InFile:
        """What to tell of a block, whose key is known, once it is in a file."""
        adapter = None if block.version == BASE_VERSION else self._adapter(block.version)
        name, version = (None, BASE_VERSION) if adapter is None else (adapter.name, adapter.version)
        assert block.digest is not None
        parent = None if block.parent is None or isinstance(block.parent, Root) else block.parent.digest
        return InFile(block.digest, parent, block.tokens, name, version)

    def _has_room(self) -> bool:
        if self._is_losing or len(self._events) >= self._most:
            self._is_losing = True
            self._num_dropped += 1
            return False
        self._num_recorded += 1
        return True

    def _adapter(self, version: int) -> Adapter:
        if version not in self._adapters:  # versions that are gone are forgotten on this occasion
            self._adapters = {adapter.version: adapter for adapter in self._store.versions()}
        return self._adapters[version]

    # --- any thread ---

    def in_file(self, about: InFile) -> None:
        """Record a block that is in a file from now on."""
        self._add(about)

    def found(self, keys: Sequence[bytes]) -> None:
        """Record blocks that were in files before."""
        for first in range(0, len(keys), MAX_FOUND):
            self._add(Found(tuple(keys[first : first + MAX_FOUND])))

    def gone(self, key: bytes) -> None:
        """Record that a block is in no file."""
        self._add(Gone(key))

    def _add(self, event: InFile | Found | Gone) -> None:
        with self._counting:
            if self._is_losing or len(self._of_files) >= self._most:
                self._is_losing = True
                self._num_dropped_of_files += 1
            else:
                self._of_files.append(event)
                self._num_of_files += 1

    # --- the publisher's thread ---

    def drain(self) -> tuple[list[Event], bool]:
        """Return all events that may be told, and whether further ones were lost after them."""
        lost = (
            self._is_losing
        )  # asked first: once it is set nothing is added, so all that is there came before the loss
        of_files = [self._of_files.popleft() for _ in range(len(self._of_files))]
        # taken after those of files, and told before: a block's parent was in the pool before the block was in a file
        taken = [self._events.popleft() for _ in range(len(self._events))]
        if lost:
            self._is_losing = False
        hashes: dict[Adapter, str | None] = {}  # as of now: a block comes after its parent, which has the same adapter
        held, self._held = self._held, {}
        told: list[Event] = []
        for one in (*held.values(), *taken):
            if not isinstance(one, Removed):
                self._tell(one, hashes, told)
            elif self._held.pop(one, None) is None:
                told.append(one)
        if lost:
            self._held.clear()  # the lost events include the removal of some of them
        return [*told, *of_files], lost

    def _tell(self, one: _Recorded, hashes: dict[Adapter, str | None], told: list[Event]) -> None:
        """Tell of a block, or hold it. hashes: of the adapters so far, filled on the way."""
        block, adapter, scope, medium = one
        content_hash = None
        if adapter is not None:
            if adapter not in hashes:
                hashes[adapter] = adapter.manifest.content_hash
            content_hash = hashes[adapter]
            if content_hash is None:
                self._held[Removed(block.number, medium)] = one
                return
        told.append(_stored(block, adapter, content_hash, scope, medium))


def _stored(block: Block, adapter: Adapter | None, content_hash: str | None, scope: Hashable, medium: Medium) -> Stored:
    parent = None if block.parent is None or isinstance(block.parent, Root) else block.parent.number
    name, version = (None, BASE_VERSION) if adapter is None else (adapter.name, adapter.version)
    assert isinstance(scope, tuple)
    return Stored(
        number=block.number,
        parent=parent,
        tokens=block.tokens,
        adapter=name,
        version=version,
        content_hash=content_hash,
        scope=scope,
        changed_from=None if block.branch is None else block.branch.changed_from,
        medium=medium,
    )
