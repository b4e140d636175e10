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
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import takewhile

from .block import (
    BASE_VERSION,
    Block,
    BlockListener,
    Branch,
    Cached,
    KeptState,
    Key,
    Medium,
    Root,
    WindowPages,
    key_of,
)
from .eviction import EvictionOrder, RestoreCosts
from .pool import PageKind, PagePool
from .prefix_tier import BlocksBelow, Tier


class PrefixCache(BlocksBelow):
    """Known full blocks, used or evictable.

    A request that knows a block also holds its ancestors' pages, except those that have left a window, or those that
    it has pages of its own for, as another request had completed an equal block before. An unused block without unused
    children can be evicted: its descendants, which such a request uses, are forgotten then. So evicting blocks, and
    pages in windows, one by one can free every CACHED page.

    Without page groups, blocks have no pages. Then a block is known while it has a checkpoint or a block after it, or
    while a request goes on from it: see `follow`.

    With a tier below, a block that loses its pages stays in its trie while there are images of them, and a request that
    begins with it takes other pages for them. Of a path in a trie, the first blocks have pages and the others none.
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
        self.num_groups = len(windows)
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
        self.tier: Tier | None = None
        """Where blocks go that lose their pages; None: nowhere."""
        self.listener: BlockListener | None = None
        self.num_blocks = Counter[tuple[int, Medium]]()
        self.num_hit_tokens = 0
        self.num_query_tokens = 0

    def __len__(self) -> int:
        """Pages of known blocks."""
        return len(self.by_page)

    def match(
        self,
        version: int,
        tokens: Sequence[Key],
        scope: Hashable = None,
        changed_from: int = 0,
        cut_at: Callable[[int], object] | None = None,
    ) -> list[Block]:
        """The known blocks that `tokens` begin with and a request can go on from; see `walk` and `usable`."""
        return self.usable(self.walk(version, tokens, scope, changed_from), cut_at)

    def walk(self, version: int, tokens: Sequence[Key], scope: Hashable = None, changed_from: int = 0) -> list[Block]:
        """The longest known run of full blocks that `tokens` begin with, leaving at least one token to compute; usable
        or not.

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
                key = key_of(key, self._branch(version, start, changed_from))
            block = block.children.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def absent(self, blocks: Sequence[Block]) -> list[tuple[int, Block, int]]:
        """What a request that begins with `blocks` needs of images: their places in its pages, with block and group."""
        if not self._windowed and (not blocks or blocks[-1].is_resident):
            return []
        step = len(self._reach)
        return [
            (at, blocks[at // step], at % step)
            for at, page in enumerate(self.pages_of(blocks))
            if not page and at % step in blocks[at // step].images and self._is_seen(at, len(blocks))
        ]

    def _is_seen(self, at: int, count: int) -> bool:
        """True if a request that begins with `count` blocks needs the page in a place of its pages."""
        index, group = divmod(at, len(self._reach))
        return group in self._full or index >= count - self._reach[group]

    def usable(
        self, blocks: Sequence[Block], cut_at: Callable[[int], object] | None = None, *, with_images: bool = True
    ) -> list[Block]:
        """The most of a run's first blocks that a request can go on from: whoever shortens a run asks here again.

        Then each page group has all pages that the next token sees, the last block has a checkpoint if it needs one,
        and nothing that must be computed as a whole is cut there. cut_at: returns what a border before the token at a
        position cuts; None: nothing. with_images: images may stand for pages and checkpoints.
        """
        if not with_images:
            blocks = list(takewhile(lambda block: block.is_resident, blocks))
        if self._windowed or self._has_states or cut_at is not None:
            ends = self._ends(blocks, with_images=with_images)
            if cut_at is not None:
                ends = (count for count in ends if cut_at(count * self._block_tokens) is None)
            blocks = blocks[: max(ends, default=0)]
        return list(blocks)

    def _ends(self, blocks: Sequence[Block], *, with_images: bool) -> Iterator[int]:
        """The numbers of blocks after which all is there that the next token sees."""
        runs = dict.fromkeys(self._windowed, 0)  # blocks in a row that have the group's page
        for count, block in enumerate(blocks, 1):
            for group in self._windowed:
                has = block.pages[group] or (with_images and group in block.images)
                runs[group] = runs[group] + 1 if has else 0
            has_state = not self._has_states or _has_checkpoint(block, with_images=with_images)
            if has_state and all(runs[group] >= min(count, self._reach[group]) for group in self._windowed):
                yield count

    def unused(self, blocks: Sequence[Block]) -> int:
        """Number of unused pages that `take` would take, which reduces the pages that can be reclaimed."""
        pages = [page for page in self.pages_of(blocks) if page]
        if blocks and (checkpoint := blocks[-1].checkpoint) is not None:
            pages += checkpoint.pages
        return sum(self._pool.kind(page) is PageKind.CACHED for page in pages)

    def pages_of(self, blocks: Sequence[Block]) -> list[int]:
        """The pages of a request that begins with `blocks`, block by block; DUMMY for one that left a window, or that
        has no page.
        """
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
        self._pool.retain(filter(None, pages))
        for block in blocks:
            block.uses += 1
            self._order.discard(block)
            if self._windowed:
                self._offer(block)
        self.num_hit_tokens += len(blocks) * self._block_tokens
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop a request's references to its pages, known blocks or not; DUMMY stands for none."""
        self._pool.release(filter(None, reversed(pages)))
        if self.by_page:
            blocks = dict.fromkeys(map(self.by_page.get, pages))
            for block in blocks:
                if block is None:
                    continue
                self._offer(block)
                self._offer_checkpoint(block)
                parent = block.parent
                if parent is not None and parent not in blocks and any(map(self._is_unused, block.pages[:1])):
                    self._offer(parent)  # of which the caller has pages of its own

    def take_checkpoint(self, block: Block) -> KeptState:
        """Add a reference to the pages of a block's checkpoint, which it has; return it."""
        checkpoint = block.checkpoint
        assert checkpoint is not None
        self._order.discard(checkpoint)
        self._pool.retain(checkpoint.pages)
        return checkpoint

    def keep_checkpoint(self, block: Block, pages: Sequence[int], accepted: int = 0) -> bool:
        """Keep the state after a block's tokens, whose pages the caller uses; False if that is impossible, or done.
        accepted: see `KeptState`.
        """
        if not block.is_known or not block.is_resident:
            return False
        if block.checkpoint is None:
            block.checkpoint = KeptState(block, pages, accepted)
        elif block.checkpoint.pages or block.checkpoint.accepted != accepted:
            return False
        else:  # only in host memory so far
            block.checkpoint.pages = list(pages)
        for page in pages:
            self.by_page[page] = block
            self._pool.keep(page)
        if self.tier is not None:
            self.tier.offer(block)
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

        parent: the block before it, as returned by `insert` or `match`; None for the first. changed_from: see `walk`.
        If an equal block is already known, it is returned, with those of the pages that it had lost: the caller keeps
        the others to itself. Returns None if the block can't be known: then the caller inserts nothing after it.
        """
        if parent is None:
            parent = self._root(BASE_VERSION if changed_from else version, scope)
        start = parent.depth * self._block_tokens
        branch = self._branch(version, start, changed_from)
        tokens = tuple(tokens)
        key = key_of(tokens, branch)
        if not parent.is_known or not parent.is_resident:
            return None  # it was evicted
        known = parent.children.get(key)
        if known is not None and known.is_resident:
            self._use_again(known, pages)
            return known
        if self.num_groups and not any(pages):
            return None  # they have left their windows
        if known is not None:
            self._return(known, pages)
            return known
        block = parent.children[key] = Block(parent, tokens, pages, next(self._numbers), branch)
        if branch is not None:
            self._branches.setdefault(version, {})[block] = None
        parent.resident[block] = None
        if self._windowed:
            block.in_windows = WindowPages(block)
            self._offer(parent)
        self._keep_pages(block, pages)
        self.tell_stored(block, Medium.POOL)
        return block

    def follow(self, left: Block | None, block: Block | None) -> None:
        """Note that a request goes on from another block than before; None: from none. Its pages say so of a block that
        has any.
        """
        if self.num_groups or left is block:
            return
        if block is not None:
            block.users += 1
        if left is not None:
            left.users -= 1
            self._prune(left)

    def _prune(self, block: Block) -> None:
        """Forget a block without page groups if nothing needs it, and then those before it."""
        while block.parent is not None and block.is_known:
            if self.num_groups or block.users or block.children or block.checkpoint is not None:
                return
            parent = block.parent
            self._forget_block(block)
            del parent.children[block.key]
            del parent.resident[block]
            if isinstance(parent, Root) and not parent.children:
                self._drop(parent)
            block = parent

    def _keep_pages(self, block: Block, pages: Sequence[int]) -> None:
        for page in filter(None, pages):
            self.by_page[page] = block
            self._pool.keep(page)

    def adopt(
        self, version: int, parent: Block | None, tokens: Sequence[Key], scope: Hashable, changed_from: int
    ) -> Block | None:
        """Return the block after `parent`, which may be new and then gets images at once; None if that is impossible.

        Arguments as of `insert`.
        """
        if parent is None:
            parent = self._root(BASE_VERSION if changed_from else version, scope)
        if not parent.is_known:
            return None
        branch = self._branch(version, parent.depth * self._block_tokens, changed_from)
        tokens = tuple(tokens)
        block = parent.children.get(key_of(tokens, branch))
        if block is None:
            pages = [PagePool.DUMMY] * self.num_groups
            block = Block(parent, tokens, pages, next(self._numbers), branch)
            block.is_resident = False
            parent.children[block.key] = block
            if branch is not None:
                self._branches.setdefault(version, {})[block] = None
            if self._windowed:
                block.in_windows = WindowPages(block)
            if self.tier is not None:
                self.tier.offer(parent)
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

    def _use_again(self, block: Block, pages: Sequence[int]) -> None:
        """Count a use of a known block, and give it the pages in windows that it has lost, of those of an equal one."""
        block.uses += 1
        for group in self._windowed:
            if not block.pages[group] and pages[group] and pages[group] not in self.by_page:
                block.pages[group] = pages[group]
                self._keep_pages(block, (pages[group],))
        if self.num_groups:
            self._offer(block)

    def forget_checkpoint(self, pages: Sequence[int]) -> bool:
        """Leave the pages of a checkpoint to the one request that uses them; False if others do, too."""
        if self._pool.references(pages[0]) > 1:
            return False
        if (block := self.by_page.get(pages[0])) is not None:  # else its block was evicted
            self._forget_checkpoint(block)
        return True

    def evict(self, item: Cached) -> None:
        """Free the pages of an unused leaf, so that its parent may become evictable; or the unused pages of a block in
        windows, or its checkpoint. What has no image then is forgotten.
        """
        if isinstance(item, KeptState):
            self._evict_checkpoint(item)
            return
        if isinstance(item, WindowPages):
            block = item.block
            groups = [group for group in self._windowed if self._is_unused(block.pages[group])]
            if self.tier is not None:
                self.tier.save(block, groups)
                self._order.discard(item)  # offered anew if a descendant's images made room
            self._forget(block, groups)
            return
        self._evict_block(item)

    def _evict_block(self, block: Block) -> None:
        for child in list(block.resident):
            self.forget(child)  # a request uses it that has pages of its own for this block
        if block.in_windows is not None:
            self._order.discard(block.in_windows)
        if self.tier is not None:
            if block.checkpoint is not None:  # first: making room for it may drop images of the block
                self._evict_checkpoint(block.checkpoint)
            self.tier.save(block, [group for group, page in enumerate(block.pages) if page])
            if block.has_images(self._windowed):
                self._leave_to_tier(block)
                return
        self.forget(block)

    def forget(self, block: Block) -> None:
        """Forget a leaf, with its descendants that have only images."""
        found = [block]
        for each in found:
            found += each.children.values()
        for each in reversed(found):
            self._forget_block(each)
        if block.parent is not None:  # the root of a trie has no page and is never offered
            self._remove_child(block.parent, block)

    def _remove_child(self, parent: Block, block: Block) -> None:
        """Take a forgotten block out of the trie."""
        del parent.children[block.key]
        parent.resident.pop(block, None)
        if isinstance(parent, Root):
            if not parent.children:
                self._drop(parent)
            return
        if not parent.is_known:  # it is being forgotten, too
            return
        if not parent.is_resident and not parent.children and not parent.images:
            self.forget(parent)
            return
        self._offer(parent)
        if self.tier is not None:
            self.tier.offer(parent)

    def evict_page(self, page: int) -> None:
        """Free an unused page, and all that is useless without it: the block's other pages in windows if it is one of
        them, the checkpoint that it is of, or else its block with all descendants.
        """
        block = self.by_page[page]
        if page not in block.pages:
            assert block.checkpoint is not None
            self._evict_checkpoint(block.checkpoint)
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
            if each.is_resident and each.is_known:
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
            self._forget_block(block)
        for block in branches:
            if block.parent is not None and block.parent.children.get(block.key) is block:
                self._remove_child(block.parent, block)

    def drop_all(self) -> int:
        """Forget all blocks; return how many. Requests keep the pages that they hold, and free them at their end."""
        found: list[Block] = list(self.roots())
        for block in found:
            found += block.children.values()
        count = sum(block.parent is not None for block in found)
        for version in [*self._branches, *self._roots]:
            self.drop_version(version)
        return count

    def _drop(self, root: Root) -> None:
        """Forget an empty trie, or else every scope would leave one for good."""
        root.is_known = False
        roots = self._roots[root.version]
        del roots[root.scope]
        if not roots:
            del self._roots[root.version]

    def _forget_block(self, block: Block) -> None:
        if not block.is_known:
            return
        block.is_known = False
        self._order.discard(block)
        if block.in_windows is not None:
            self._order.discard(block.in_windows)
        if block.branch is not None:
            branches = self._branches[block.branch.version]
            del branches[block]
            if not branches:
                del self._branches[block.branch.version]
        if block.is_resident:
            self.tell_removed(block, Medium.POOL)
        self._forget(block, range(len(block.pages)))
        self._forget_checkpoint(block)
        if self.tier is not None:
            self.tier.forget(block)

    def _forget(self, block: Block, groups: Iterable[int]) -> None:
        """Forget a block's pages in some groups, and free those that are unused."""
        for group in groups:
            if not (page := block.pages[group]):
                continue
            block.pages[group] = PagePool.DUMMY
            self._let_go(page)

    def _let_go(self, page: int) -> None:
        """Stop keeping a page, whatever it held."""
        if self.tier is not None:
            self.tier.page_left(page)
        del self.by_page[page]
        self._pool.forget(page)

    def _evict_checkpoint(self, checkpoint: KeptState) -> None:
        """Free a checkpoint's pages; forget it if there are no images of them."""
        if self.tier is not None and checkpoint.pages:
            self.tier.save_state(checkpoint)
        if not checkpoint.images:
            self._forget_checkpoint(checkpoint.block)
            return
        self._free_checkpoint(checkpoint)
        if self.tier is not None:
            self.tier.offer(checkpoint.block)

    def _forget_checkpoint(self, block: Block) -> None:
        if (checkpoint := block.checkpoint) is None:
            return
        block.checkpoint = None
        self._free_checkpoint(checkpoint)
        if self.tier is not None:
            self.tier.forget_state(checkpoint)
        self._prune(block)

    def _free_checkpoint(self, checkpoint: KeptState) -> None:
        self._order.discard(checkpoint)
        pages, checkpoint.pages = checkpoint.pages, []
        for page in pages:
            self._let_go(page)

    def _offer_checkpoint(self, block: Block) -> None:
        """Make a block's checkpoint evictable if it is unused."""
        checkpoint = block.checkpoint
        if checkpoint is not None and checkpoint.pages and self._is_unused(checkpoint.pages[0]):
            count = len(checkpoint.pages)
            self._order.add(checkpoint, count, count * self._costs.prefix_page, block.uses, depth=block.depth)

    def _is_unused(self, page: int) -> bool:
        return page != PagePool.DUMMY and self._pool.kind(page) is PageKind.CACHED

    def _offer(self, block: Block) -> None:
        """Make a block evictable if it is an unused leaf, or else its unused pages in windows. Without page groups,
        forget it if nothing needs it.
        """
        if block.parent is None or not block.is_resident:
            return
        if not self.num_groups:
            self._prune(block)
        elif block.in_windows is not None:
            self._offer_in_windows(block, block.in_windows)
        elif self._is_unused(block.pages[0]) and self._is_leaf(block):
            self._add(block, block, len(block.pages))
        else:
            self._order.discard(block)

    def _is_leaf(self, block: Block) -> bool:
        """True if no child of an unused block has pages that are unused, too."""
        if not block.resident:
            return True
        if not self._full:
            return False  # all its pages are in windows, and can be evicted anyway
        return not any(self._is_unused(each.pages[0]) for each in block.resident)

    def _offer_in_windows(self, block: Block, in_windows: WindowPages) -> None:
        """As `_offer`, of a block of a model with windows."""
        self._order.discard(block)
        self._order.discard(in_windows)
        pages, full = block.pages, [block.pages[group] for group in self._full]
        unused = [page for page in pages if self._is_unused(page)]
        # a request that refills a block holds its pages in windows and not the others
        if all(map(self._is_unused, full or filter(None, pages))) and self._is_leaf(block):
            if any(pages):
                self._add(block, block, len(unused))
            else:
                self.evict(block)
        elif count := sum(self._is_unused(pages[group]) for group in self._windowed):
            self._add(in_windows, block, count)

    def _add(self, item: Block | WindowPages, block: Block, count: int) -> None:
        """Make `count` pages of a block evictable."""
        self._order.add(item, count, count * self._costs.prefix_page, block.uses, depth=block.depth)


def _has_checkpoint(block: Block, *, with_images: bool) -> bool:
    state = block.checkpoint
    return state is not None and bool(state.pages or with_images)
