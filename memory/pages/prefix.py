"""The prefix cache: full KV blocks that later requests with the same adapter version and tokens can start from; and
block tables, which begin with them.

There is one trie of blocks per adapter version and scope. Lookups compare the tokens themselves, so hash collisions
can't occur. A removed version takes its tries with it, so a reloaded adapter can't get the KV of its predecessor. The
scope (tenant and salt) selects the trie before any token is compared, so no choice of tokens reaches another scope's
blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from .eviction import EvictionOrder, RestoreCosts
from .pool import PageKind, PagePool

#: Version of the base model's trie; adapter versions count from 1.
BASE_VERSION = 0


class Block:
    """A full block in the trie: its page holds the KV of `tokens`, computed after its ancestors' tokens."""

    __slots__ = ("children", "depth", "page", "parent", "tokens", "uses")

    def __init__(self, parent: Block | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.depth = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Block] = {}
        self.uses = 1


class Root(Block):
    """Root of the trie of one adapter version and one scope."""

    __slots__ = ("scope", "version")

    def __init__(self, version: int, scope: Hashable) -> None:
        super().__init__(None, (), PagePool.DUMMY)
        self.version = version
        self.scope = scope


class BlockListener(Protocol):
    """Called for each stored block, after its parent, and for each removed block, by page."""

    def stored(self, version: int, scope: Hashable, block: Block) -> None: ...

    def removed(self, page: int) -> None: ...


class PrefixCache:
    """Known full blocks, used or evictable.

    A request that knows a block also holds the block's ancestors. Therefore an unused block has only unused
    descendants, and evicting leaves one by one can free every CACHED page.
    """

    def __init__(self, pool: PagePool, order: EvictionOrder, costs: RestoreCosts, block_tokens: int) -> None:
        self._pool = pool
        self._order = order
        self._costs = costs
        self._block_tokens = block_tokens
        self._roots: dict[int, dict[Hashable, Root]] = {}
        self.by_page: dict[int, Block] = {}
        """The known blocks."""
        self.listener: BlockListener | None = None
        self.num_hit_tokens = 0
        self.num_query_tokens = 0

    def __len__(self) -> int:
        return len(self.by_page)

    def match(self, version: int, tokens: Sequence[int], scope: Hashable = None) -> list[Block]:
        """The longest known run of full blocks that `tokens` begin with, leaving at least one token to compute.

        scope: only blocks stored with an equal scope are found.
        """
        found: list[Block] = []
        roots = self._roots.get(version)
        block: Block | None = None if roots is None else roots.get(scope)
        if block is None:
            return found
        step = self._block_tokens
        for start in range(0, (len(tokens) - 1) // step * step, step):
            block = block.children.get(tuple(tokens[start : start + step]))
            if block is None:
                break
            found.append(block)
        return found

    def unused(self, blocks: Iterable[Block]) -> int:
        """Number of the blocks with an unused page: taking them reduces the pages that can be reclaimed."""
        return sum(self._pool.kind(block.page) is PageKind.CACHED for block in blocks)

    def take(self, blocks: Sequence[Block], num_tokens: int) -> list[int]:
        """Use matched blocks for a request of `num_tokens` tokens, adding one reference each; return their pages in
        order.
        """
        self.num_query_tokens += num_tokens
        if not blocks:
            return []
        pages = [block.page for block in blocks]
        self._pool.retain(pages)
        for block in blocks:
            block.uses += 1
            self._order.discard(block)
        self.num_hit_tokens += len(blocks) * self._block_tokens
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop a request's references to its pages, known blocks or not."""
        self._pool.release(reversed(pages))
        for page in pages if self.by_page else ():
            block = self.by_page.get(page)
            if block is not None:
                self._offer(block)

    def insert(
        self, version: int, parent: Block | None, tokens: Sequence[int], page: int, scope: Hashable = None
    ) -> Block | None:
        """Store a block whose KV was just completed in `page`, which the caller uses.

        parent: the block before it, as returned by `insert` or `match`; None for the first. Returns None if an equal
        block is already known: then the caller keeps its own page to itself and inserts nothing after it.
        """
        if parent is None:
            roots = self._roots.setdefault(version, {})
            parent = roots.get(scope)
            if parent is None:
                parent = roots[scope] = Root(version, scope)
        key = tuple(tokens)
        if key in parent.children:
            return None
        block = parent.children[key] = Block(parent, key, page)
        self.by_page[page] = block
        self._pool.keep(page)
        if self.listener is not None:
            self.listener.stored(version, scope, block)
        return block

    def evict(self, block: Block) -> None:
        """Forget an unused leaf and free its page; its parent may become evictable."""
        self._forget(block)
        if (parent := block.parent) is None:  # the root of a trie has no page and is never offered
            return
        del parent.children[block.tokens]
        if isinstance(parent, Root):
            if not parent.children:
                self._drop(parent)
        else:
            self._offer(parent)

    def evict_from(self, block: Block) -> None:
        """Forget an unused block and all its descendants, and free their pages."""
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
        while stack:
            block = stack.pop()
            stack.extend(block.children.values())
            self._order.discard(block)
            self._forget(block)

    def _drop(self, root: Root) -> None:
        """Forget an empty trie, or else every scope would leave one for good."""
        roots = self._roots[root.version]
        del roots[root.scope]
        if not roots:
            del self._roots[root.version]

    def _forget(self, block: Block) -> None:
        del self.by_page[block.page]
        self._pool.forget(block.page)
        if self.listener is not None:
            self.listener.removed(block.page)

    def _offer(self, block: Block) -> None:
        """Make a block evictable if it is an unused leaf."""
        if block.parent is not None and not block.children and self._pool.kind(block.page) is PageKind.CACHED:
            self._order.add(block, 1, self._costs.prefix_page, block.uses, depth=block.depth)


class BlockTable:
    """A request's KV pages, in order of its tokens.

    It starts with the pages of a matched prefix, grows by whole pages, and frees all of them at once.
    """

    __slots__ = ("_block_tokens", "_pool", "_prefix", "pages")

    def __init__(self, pool: PagePool, prefix: PrefixCache, block_tokens: int, pages: list[int] | None = None) -> None:
        self._pool = pool
        self._prefix = prefix
        self._block_tokens = block_tokens
        self.pages = [] if pages is None else pages

    def missing_pages(self, num_tokens: int) -> int:
        """Pages to allocate before `num_tokens` tokens fit."""
        missing = -(-num_tokens // self._block_tokens) - len(self.pages)
        return missing if missing > 0 else 0

    def grow(self, num_tokens: int) -> None:
        """Cover `num_tokens` tokens. Raises OutOfPages, and changes nothing, if the pool has too few pages."""
        self.add_pages(self.missing_pages(num_tokens))

    def add_pages(self, count: int) -> None:
        """Grow by `count` pages. Raises OutOfPages, and changes nothing, if the pool has too few."""
        self.pages += self._pool.allocate(count, PageKind.KV)

    def hand_over(self) -> BlockTable:
        """Move the pages to a new table and return it; this table becomes empty."""
        pages, self.pages = self.pages, []
        return BlockTable(self._pool, self._prefix, self._block_tokens, pages)

    def free(self) -> None:
        """Drop every page; pages of known blocks stay cached until evicted."""
        pages, self.pages = self.pages, []
        self._prefix.release(pages)
