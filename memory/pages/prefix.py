"""The prefix cache: full KV blocks that later requests with the same adapter version and tokens can start from.

A block has a page of each page group, and may have a checkpoint: the recurrent state after its tokens. Pages in windows
and checkpoints are evicted apart from their block.

There is one trie of blocks per adapter version and scope. An adapter that changes a prompt's tokens only from one of
them on shares the base model's blocks before it; its own blocks branch off there. Lookups compare the tokens
themselves, so hash collisions can't occur. A removed version takes its tries and branches with it, so a reloaded
adapter can't get the KV of its predecessor. The scope (tenant and salt) selects the trie before any token is compared,
so no choice of tokens reaches another scope's blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from .eviction import EvictionOrder, RestoreCosts
from .pool import PageKind, PagePool

Key = int | tuple[str, int]
"""What is compared of a position: its token, or the digest of an image and the number of a row of it."""

#: Version of the base model's trie; adapter versions count from 1.
BASE_VERSION = 0


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
        "in_windows",
        "is_known",
        "number",
        "pages",
        "parent",
        "tokens",
        "uses",
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
        self.number = number
        """By which events name it: no other block ever has it, unlike its pages."""
        self.tokens = tokens
        self.pages = list(pages)
        """One of each page group; `PagePool.DUMMY` where it was evicted, which happens only to pages in windows."""
        self.depth = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[Key, ...], Block] = {}
        self.uses = 1
        self.is_known = True
        self.in_windows: WindowPages | None = None
        """The item that stands for its pages in windows in the eviction order, if the model has windows."""
        self.checkpoint: KeptState | None = None
        """The state after its tokens, if it is kept."""

    @property
    def key(self) -> tuple[Key, ...]:
        """Its parent's key for it."""
        return _key(self.tokens, self.branch)


class WindowPages:
    """A block's pages in groups with a window: they may be evicted before the block's descendants."""

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        self.block = block


class KeptState:
    """The state after a block's tokens: evictable by itself."""

    __slots__ = ("accepted", "block", "pages")

    def __init__(self, block: Block, pages: Sequence[int], accepted: int) -> None:
        self.block = block
        self.pages = list(pages)
        self.accepted = accepted
        """The last so many tokens of the block were accepted drafts; the state has their inputs: see `StateSlots`."""


class Root(Block):
    """Root of the trie of one adapter version and one scope."""

    __slots__ = ("scope", "version")

    def __init__(self, version: int, scope: Hashable) -> None:
        super().__init__(None, (), (PagePool.DUMMY,), 0)
        self.version = version
        self.scope = scope


class BlockListener(Protocol):
    """Called for each stored block, after its parent, and for each removed block, by number."""

    def stored(self, version: int, scope: Hashable, block: Block) -> None: ...

    def removed(self, number: int) -> None: ...


class PrefixCache:
    """Known full blocks, used or evictable.

    A request that knows a block also holds its ancestors' pages, except those that have left a window. Therefore an
    unused block has only unused descendants, and evicting leaves, and pages in windows, one by one can free every
    CACHED page.
    """

    def __init__(
        self,
        pool: PagePool,
        order: EvictionOrder,
        costs: RestoreCosts,
        block_tokens: int,
        windows: Sequence[int | None] = (None,),
        *,
        has_states: bool = False,
    ) -> None:
        """windows: of each page group. has_states: requests can only begin where there is a checkpoint."""
        self._has_states = has_states
        self._pool = pool
        self._order = order
        self._costs = costs
        self._block_tokens = block_tokens
        self._windowed = [group for group, window in enumerate(windows) if window is not None]
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._reach = [
            0 if window is None else -(-(window - 1) // block_tokens) for window in windows
        ]  # blocks that the next token of a group with a window sees
        self._roots: dict[int, dict[Hashable, Root]] = {}
        self._branches: dict[int, dict[Block, None]] = {}  # by version
        self._numbers = itertools.count(1)
        self.by_page: dict[int, Block] = {}
        """The known blocks."""
        self.listener: BlockListener | None = None
        self.num_hit_tokens = 0
        self.num_query_tokens = 0

    def __len__(self) -> int:
        """Pages of known blocks."""
        return len(self.by_page)

    def match(self, version: int, tokens: Sequence[Key], scope: Hashable = None, changed_from: int = 0) -> list[Block]:
        """The longest known run of full blocks that `tokens` begin with, leaving at least one token to compute, from
        which a request can go on: each page group has all pages that the next token sees.

        scope: only blocks stored with an equal scope are found. changed_from: index of the first token that the version
        changes; the blocks before it are the base model's.
        """
        found: list[Block] = []
        roots = self._roots.get(BASE_VERSION if changed_from else version)
        block: Block | None = None if roots is None else roots.get(scope)
        if block is None:
            return found
        step = self._block_tokens
        for start in range(0, (len(tokens) - 1) // step * step, step):
            key = tuple(tokens[start : start + step])
            if start <= changed_from < start + step:
                key = _key(key, self._branch(version, start, changed_from))
            block = block.children.get(key)
            if block is None:
                break
            found.append(block)
        return self._usable(found) if self._windowed or self._has_states else found

    def _usable(self, blocks: list[Block]) -> list[Block]:
        """The most of a run's first blocks of which the last ones have all pages in their windows, and the last a
        checkpoint if it needs one.
        """
        longest = 0
        runs = dict.fromkeys(self._windowed, 0)  # blocks in a row that have the group's page
        for count, block in enumerate(blocks, 1):
            for group in self._windowed:
                runs[group] = runs[group] + 1 if block.pages[group] else 0
            if self._has_states and block.checkpoint is None:
                continue
            if all(runs[group] >= min(count, self._reach[group]) for group in self._windowed):
                longest = count
        return blocks[:longest]

    def unused(self, blocks: Sequence[Block]) -> int:
        """Number of unused pages that `take` would take, which reduces the pages that can be reclaimed."""
        pages = [page for page in self.pages_of(blocks) if page]
        if blocks and (checkpoint := blocks[-1].checkpoint) is not None:
            pages += checkpoint.pages
        return sum(self._pool.kind(page) is PageKind.CACHED for page in pages)

    def pages_of(self, blocks: Sequence[Block]) -> list[int]:
        """The pages of a request that begins with `blocks`, block by block; DUMMY for one that left a window."""
        if not self._windowed:
            return [page for block in blocks for page in block.pages]
        count, reach = len(blocks), self._reach
        seen = [0 if group in self._full else count - reach[group] for group in range(len(reach))]
        return [
            page if index >= first else PagePool.DUMMY
            for index, block in enumerate(blocks)
            for page, first in zip(block.pages, seen, strict=True)
        ]

    def take(self, blocks: Sequence[Block], num_tokens: int) -> list[int]:
        """Use matched blocks for a request of `num_tokens` tokens, with a reference each; return their pages."""
        self.num_query_tokens += num_tokens
        if not blocks:
            return []
        pages = self.pages_of(blocks)
        self._pool.retain(filter(None, pages) if self._windowed else pages)
        for block in blocks:
            block.uses += 1
            self._order.discard(block)
            if self._windowed:
                self._offer(block)
        self.num_hit_tokens += len(blocks) * self._block_tokens
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop a request's references to its pages, known blocks or not; DUMMY stands for none."""
        self._pool.release(filter(None, reversed(pages)) if self._windowed else reversed(pages))
        if self.by_page:
            for block in dict.fromkeys(map(self.by_page.get, pages)):
                if block is not None:
                    self._offer(block)
                    self._offer_checkpoint(block)

    def take_checkpoint(self, block: Block) -> KeptState:
        """Add a reference to the pages of a block's checkpoint, which there is; return it."""
        checkpoint = block.checkpoint
        assert checkpoint is not None
        self._order.discard(checkpoint)
        self._pool.retain(checkpoint.pages)
        return checkpoint

    def keep_checkpoint(self, block: Block, pages: Sequence[int], accepted: int = 0) -> bool:
        """Keep the state after a block's tokens, whose pages the caller uses; False if that is impossible, or done.
        accepted: see `KeptState`.
        """
        if block.checkpoint is not None or not block.is_known:
            return False
        block.checkpoint = KeptState(block, pages, accepted)
        for page in pages:
            self.by_page[page] = block
            self._pool.keep(page)
        return True

    def insert(
        self,
        version: int,
        parent: Block | None,
        tokens: Sequence[Key],
        pages: Sequence[int],
        scope: Hashable = None,
        changed_from: int = 0,
    ) -> Block | None:
        """Store a block whose KV was just completed in `pages`, one of each group, which the caller uses.

        parent: the block before it, as returned by `insert` or `match`; None for the first. changed_from: see `match`.
        Returns None if an equal block is already known: then the caller keeps its own pages to itself and inserts
        nothing after it, but see `refill`.
        """
        if parent is None:
            parent = self._root(BASE_VERSION if changed_from else version, scope)
        start = parent.depth * self._block_tokens
        branch = self._branch(version, start, changed_from)
        tokens = tuple(tokens)
        key = _key(tokens, branch)
        if key in parent.children:
            return None
        if not parent.is_known or not any(pages):  # the parent was evicted, or all pages have left, behind a window
            return None
        block = parent.children[key] = Block(parent, tokens, pages, next(self._numbers), branch)
        if branch is not None:
            self._branches.setdefault(version, {})[block] = None
        if self._windowed:
            block.in_windows = WindowPages(block)
            self._offer(parent)
        for page in pages:
            if page:
                self.by_page[page] = block
                self._pool.keep(page)
        if self.listener is not None:
            is_changed = changed_from < start + self._block_tokens
            self.listener.stored(version if is_changed else BASE_VERSION, scope, block)
        return block

    def _root(self, version: int, scope: Hashable) -> Root:
        """Return the root of a trie, which may be new."""
        roots = self._roots.setdefault(version, {})
        root = roots.get(scope)
        if root is None:
            root = roots[scope] = Root(version, scope)
        return root

    def _branch(self, version: int, start: int, changed_from: int) -> Branch | None:
        """Return where a version begins to act in the block of the tokens from `start` on; None if it does not begin
        there, or at a prompt's first token.
        """
        if not changed_from or not start <= changed_from < start + self._block_tokens:
            return None
        return Branch(version, changed_from - start)

    def refill(
        self,
        version: int,
        parent: Block | None,
        tokens: Sequence[Key],
        pages: Sequence[int],
        scope: Hashable = None,
        changed_from: int = 0,
    ) -> Block | None:
        """Give a known block the pages in windows that it has lost; arguments as of `insert`. Return the block; None if
        no such block is known.
        """
        if parent is None:
            parent = self._roots.get(BASE_VERSION if changed_from else version, {}).get(scope)
        if parent is None:
            return None
        branch = self._branch(version, parent.depth * self._block_tokens, changed_from)
        block = parent.children.get(_key(tuple(tokens), branch))
        if block is None:
            return None
        for group in self._windowed:
            if not block.pages[group] and pages[group] and pages[group] not in self.by_page:
                block.pages[group] = page = pages[group]
                self.by_page[page] = block
                self._pool.keep(page)
        self._offer(block)
        return block

    def forget_checkpoint(self, pages: Sequence[int]) -> bool:
        """Leave the pages of a checkpoint to the one request that uses them; False if others do, too."""
        if self._pool.references(pages[0]) > 1:
            return False
        if (block := self.by_page.get(pages[0])) is not None:  # else its block was evicted
            self._forget_checkpoint(block)
        return True

    def evict(self, item: Block | WindowPages | KeptState) -> None:
        """Forget an unused leaf and free its pages, so that its parent may become evictable; or free the unused pages
        of a block in windows, or its checkpoint.
        """
        if isinstance(item, KeptState):
            self._forget_checkpoint(item.block)
            return
        if isinstance(item, WindowPages):
            pages = item.block.pages
            self._forget(item.block, [group for group in self._windowed if self._is_unused(pages[group])])
            return
        if item.in_windows is not None:
            self._order.discard(item.in_windows)
        self._forget_block(item)
        if item.parent is not None:  # the root of a trie has no page and is never offered
            self._remove_child(item.parent, item)

    def _remove_child(self, parent: Block, block: Block) -> None:
        """Take a forgotten block out of the trie."""
        del parent.children[block.key]
        if isinstance(parent, Root):
            if not parent.children:
                self._drop(parent)
        else:
            self._offer(parent)

    def evict_page(self, page: int) -> None:
        """Free an unused page, and all that is useless without it: the block's other pages in windows if it is one of
        them, the checkpoint that it is of, or else its block with all descendants.
        """
        block = self.by_page[page]
        if page not in block.pages:
            self._forget_checkpoint(block)
            return
        if block.in_windows is not None and block.pages.index(page) in self._windowed:
            self._order.discard(block.in_windows)
            self.evict(block.in_windows)
            self._offer(block)
            return
        found = [block]
        for each in found:
            found += each.children.values()
        for each in reversed(found):
            self._order.discard(each)
            self.evict(each)

    def roots(self) -> Iterator[Root]:
        """The root of every trie."""
        for roots in self._roots.values():
            yield from roots.values()

    def drop_version(self, version: int) -> None:
        """Forget all blocks of an adapter version that no request holds any more."""
        roots = self._roots.pop(version, {})
        stack = [block for root in roots.values() for block in root.children.values()]
        branches = list(self._branches.get(version, ()))
        stack += branches
        while stack:
            block = stack.pop()
            stack.extend(block.children.values())
            self._order.discard(block)
            if block.in_windows is not None:
                self._order.discard(block.in_windows)
            self._forget_block(block)
        for block in branches:
            if block.parent is not None:
                self._remove_child(block.parent, block)

    def _drop(self, root: Root) -> None:
        """Forget an empty trie, or else every scope would leave one for good."""
        root.is_known = False
        roots = self._roots[root.version]
        del roots[root.scope]
        if not roots:
            del self._roots[root.version]

    def _forget_block(self, block: Block) -> None:
        block.is_known = False
        if block.branch is not None:
            branches = self._branches[block.branch.version]
            del branches[block]
            if not branches:
                del self._branches[block.branch.version]
        if self.listener is not None:
            self.listener.removed(block.number)
        self._forget(block, range(len(block.pages)))
        self._forget_checkpoint(block)

    def _forget(self, block: Block, groups: Iterable[int]) -> None:
        """Forget a block's pages in some groups, and free those that are unused."""
        for group in groups:
            if not (page := block.pages[group]):
                continue
            if self._windowed:
                block.pages[group] = PagePool.DUMMY
            del self.by_page[page]
            self._pool.forget(page)

    def _forget_checkpoint(self, block: Block) -> None:
        if (checkpoint := block.checkpoint) is None:
            return
        block.checkpoint = None
        self._order.discard(checkpoint)
        for page in checkpoint.pages:
            del self.by_page[page]
            self._pool.forget(page)

    def _offer_checkpoint(self, block: Block) -> None:
        """Make a block's checkpoint evictable if it is unused."""
        checkpoint = block.checkpoint
        if checkpoint is not None and self._is_unused(checkpoint.pages[0]):
            count = len(checkpoint.pages)
            self._order.add(checkpoint, count, count * self._costs.prefix_page, block.uses, depth=block.depth)

    def _is_unused(self, page: int) -> bool:
        return page != PagePool.DUMMY and self._pool.kind(page) is PageKind.CACHED

    def _offer(self, block: Block) -> None:
        """Make a block evictable if it is an unused leaf, or else its unused pages in windows."""
        if block.parent is None:
            return
        if block.in_windows is None:
            if not block.children and self._is_unused(block.pages[0]):
                self._add(block, block, len(block.pages))
            return
        self._order.discard(block)
        self._order.discard(block.in_windows)
        pages, full = block.pages, [block.pages[group] for group in self._full]
        unused = [page for page in pages if self._is_unused(page)]
        # a request that refills a block holds its pages in windows and not the others
        if not block.children and all(map(self._is_unused, full or filter(None, pages))):
            if any(pages):
                self._add(block, block, len(unused))
            else:
                self.evict(block)
        elif count := sum(self._is_unused(pages[group]) for group in self._windowed):
            self._add(block.in_windows, block, count)

    def _add(self, item: Block | WindowPages, block: Block, count: int) -> None:
        """Make `count` pages of a block evictable."""
        self._order.add(item, count, count * self._costs.prefix_page, block.uses, depth=block.depth)


def _key(tokens: tuple[Key, ...], branch: Branch | None) -> tuple[Key, ...]:
    """A child's key: branches of other versions, or from other tokens on, are other children."""
    return tokens if branch is None else (*tokens, *branch)
