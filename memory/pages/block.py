"""Blocks of the prefix cache: full KV blocks, their pages in windows, and the recurrent states after them.

Tests: tests/memory/pages/test_prefix.py
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from .pool import PagePool

Key = int | tuple[str, int]
"""What is compared of a position: its token, or the digest of an image and the number of a row of it."""

#: Version of the base model's trie; adapter versions count from 1.
BASE_VERSION = 0


class Medium(StrEnum):
    """A medium that may have a block's KV."""

    POOL = "pool"
    HOST = "host"
    DISK = "disk"


class Branch(NamedTuple):
    """The block in which an adapter begins to act."""

    version: int

    changed_from: int
    """Index of the first token of the block that it changes."""


class Block:
    """A full block in the trie: its pages hold the KV of `tokens`, computed after its ancestors' tokens."""

    __slots__ = (
        "branch",
        "checkpoint",
        "children",
        "depth",
        "digest",
        "holds",
        "images",
        "in_windows",
        "is_known",
        "is_resident",
        "number",
        "pages",
        "parent",
        "resident",
        "scope",
        "tokens",
        "users",
        "uses",
        "version",
        "waiting",
        "written",
    )

    def __init__(
        self,
        parent: Block | None,
        tokens: tuple[Key, ...],
        pages: Sequence[int],
        number: int,
        branch: Branch | None = None,
    ) -> None:
        self.parent = parent
        self.branch = branch
        """Not None if an adapter begins to act in it, after tokens that it leaves to the base model."""
        self.version = BASE_VERSION if parent is None else parent.version
        """Of the adapter that its KV was computed with."""
        if branch is not None:
            self.version = branch.version
        self.scope: Hashable = None if parent is None else parent.scope
        """Who may use it."""
        self.number = number
        """By which events name it: no other block ever has it, unlike its pages."""
        self.tokens = tokens
        self.pages = list(pages)
        """One of each page group; `PagePool.DUMMY` where it was evicted: pages in windows, or all of them."""
        self.depth = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[Key, ...], Block] = {}
        self.uses = 1
        self.users = 0
        """Requests that go on from it, where blocks have no pages; see `PrefixCache.follow`."""
        self.is_known = True
        self.is_resident = True
        """False if all that is left of it is in host memory. Then so are its descendants."""
        self.resident: dict[Block, None] = {}
        """Children that are resident."""
        self.images: dict[int, Any] = {}
        """Host images of its pages, by page group."""
        self.digest: bytes | None = None
        """Its key in files, once it was needed."""
        self.written = 0
        """Parts of it that were given to be written to a file: its page groups, and its checkpoint."""
        self.holds = 0
        """Requests that are about to copy its images: they must not be dropped."""
        self.waiting = 0
        """Requests that wait and begin with it: its images are dropped last."""
        self.in_windows: WindowPages | None = None
        """The item that stands for its pages in windows in the eviction order, if the model has windows."""
        self.checkpoint: KeptState | None = None
        """The state after its tokens, if it is kept."""

    @property
    def key(self) -> tuple[Key, ...]:
        """Its parent's key for it."""
        return key_of(self.tokens, self.branch)

    def has_images(self, windowed: Container[int]) -> bool:
        """True if there are images of all its pages outside windows, or of some if all are in windows."""
        full = [group for group in range(len(self.pages)) if group not in windowed]
        return bool(self.images) and all(group in self.images for group in full)


class WindowPages:
    """A block's pages in groups with a window: they may be evicted before the block's descendants."""

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        self.block = block


class KeptState:
    """The state after a block's tokens: evictable by itself."""

    __slots__ = ("accepted", "block", "images", "pages")

    def __init__(self, block: Block, pages: Sequence[int], accepted: int) -> None:
        self.block = block
        self.pages = list(pages)
        """Empty if it is only in host memory."""
        self.images: list[Any] = []
        """Host images of its pages; empty if there are none."""
        self.accepted = accepted
        """The last so many tokens of the block were accepted drafts; the state has their inputs: see `StateSlots`."""


class Root(Block):
    """Root of the trie of one adapter version and one scope."""

    __slots__ = ()

    def __init__(self, version: int, scope: Hashable) -> None:
        super().__init__(None, (), (PagePool.DUMMY,), 0)
        self.version = version
        self.scope = scope


Cached = Block | WindowPages | KeptState
"""An item of the eviction orders."""


class BlockListener(Protocol):
    """Called when all pages of a block are in a medium, after its parent's, and when they are not any more."""

    def stored(self, version: int, scope: Hashable, block: Block, medium: Medium) -> None: ...

    def removed(self, number: int, medium: Medium) -> None: ...


def key_of(tokens: tuple[Key, ...], branch: Branch | None) -> tuple[Key, ...]:
    """A child's key: branches of other versions, or from other tokens on, are other children."""
    return tokens if branch is None else (*tokens, *branch)
