"""Checks that every block which the prefix cache knows holds its own KV, in the pool and in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chorus.core.engine import Engine
from chorus.memory.pages.block import BASE_VERSION, Block, Medium
from chorus.memory.pages.pool import PageKind

from .asked import Violation, promise
from .checked_executor import CheckedExecutor, of_group, state_in
from .made_up_images import input_of
from .made_up_model import branched, content_of, kv_before, kv_behind


class CheckedBlocks:
    """The blocks of an engine. reached: counts rare events."""

    def __init__(self, engine: Engine, executor: CheckedExecutor, reached: Counter[str]) -> None:
        self.engine, self.executor, self.reached = engine, executor, reached

    def check(self) -> None:
        """Every known block's page holds the KV of its adapter version and tokens, and only live versions have any."""
        prefix, pool, dtype = self.engine.prefix, self.engine.pool, self.engine.config.dtype
        contents = {each.version: content_of(each) for each in self.engine.store.versions()}
        contents[BASE_VERSION] = content_of(None)
        pages, num_cached, places = set[int](), 0, Counter[tuple[int, Medium]]()
        windowed = [group for group, window in enumerate(self.executor.layout.group_windows) if window is not None]
        for root in prefix.roots():
            promise(root.version in contents, "blocks of a version that is gone")
            stack = [(child, kv_before(contents[root.version], dtype)) for child in root.children.values()]
            while stack:
                block, last = stack.pop()
                tokens = tuple(map(input_of, block.tokens))
                if (branch := block.branch) is None:
                    want = kv_behind(last, tokens)
                else:
                    promise(branch.version in contents, "a branch of a version that is gone")
                    self.reached["branch"] += 1
                    before = kv_behind(last, tokens[: branch.changed_from])
                    begin = branched((before or [last])[-1], contents[branch.version])
                    want = before + kv_behind(begin, tokens[branch.changed_from :])
                num_cached += self._check_block(block, root.version, want, pages)
                places[block.version, Medium.POOL] += block.is_resident
                places[block.version, Medium.HOST] += block.has_images(windowed)
                stack += [(child, want[-1]) for child in block.children.values()]
        promise(len(prefix) == len(pages), "the cache counts other pages than it has")
        promise(prefix.num_blocks == +places, "the cache counts other blocks than it has")
        promise(pool.count(PageKind.CACHED) == num_cached, "a cached page of no known block")

    def _check_block(self, block: Block, version: int, want: list[int], pages: set[int]) -> int:
        """Check a known block's pages, and that what is unused of them can be evicted; add them to `pages`, and return
        how many are unused.
        """
        kinds = {page: self.engine.pool.kind(page) for page in block.pages if page}
        windows = self.executor.layout.group_windows
        wanted = [[of_group(group, value) for value in want] for group in range(len(windows))]
        for group, image in block.images.items():
            promise(image[0] == wanted[group], "host memory has another page than the block's")
            self.reached["page in host memory"] += 1
        if not block.is_resident:
            return self._check_hosted(block, want[-1])
        for group, page in enumerate(block.pages):
            promise(bool(page) or windows[group] is not None, "a block lost a page that is in no window")
            if page and self.executor.memory[page] != [of_group(group, value) for value in want]:
                raise Violation(f"the cached block {block.tokens} of version {version} holds something else")
        if pages.intersection(kinds) or not {PageKind.KV, PageKind.CACHED}.issuperset(kinds.values()):
            raise Violation(f"pages {kinds} of a known block are others', too, or of other kinds")
        pages.update(kinds)
        unused_state = self._check_checkpoint(block, want[-1], pages)
        if not windows:
            self._check_without_pages(block)
            return unused_state
        order, unused = self.engine.reclaimer.order, [page for page, kind in kinds.items() if kind is PageKind.CACHED]
        anchors = [page for page, window in zip(block.pages, windows, strict=True) if not window] or kinds
        resident = {child for child in block.children.values() if child.is_resident}
        promise(resident == block.resident.keys(), "a block has other descendants with pages than it knows")
        is_unused = set(anchors) <= set(unused) and not self._has_unused_child(block, windows)
        promise(bool(kinds) or bool(resident), "a known block without pages or descendants that have any")
        in_windows = [page for page, window in zip(block.pages, windows, strict=True) if window and page in unused]
        if (block in order) != is_unused or (block.in_windows in order) != (bool(in_windows) and not is_unused):
            raise Violation(f"pages {kinds} can be evicted, and must not, or can't, and must")
        return len(unused) + unused_state

    def _has_unused_child(self, block: Block, windows: Sequence[int | None]) -> bool:
        """True if a child must be evicted before its block."""
        children = [each for each in block.children.values() if each.is_resident]
        if None not in windows:
            return bool(children)
        kind = self.engine.pool.kind
        return any(kind(each.pages[windows.index(None)]) is PageKind.CACHED for each in children)

    def _check_without_pages(self, block: Block) -> None:
        """Check that something needs a known block of a model whose tokens take no page."""
        at = sum(each.last_block is block for each in self.engine.scheduler.running)
        promise(block.users == at, "a block counts other requests than go on from it")
        promise(bool(at or block.children or block.checkpoint), "a known block that nothing needs")
        promise(block not in self.engine.reclaimer.order, "a block without pages can be evicted")
        self.reached["block without pages"] += 1

    def _check_hosted(self, block: Block, kv: int) -> int:
        """Check a block that has only images; it has no page."""
        windows = self.executor.layout.group_windows
        promise(not any(block.pages), "a block without pages has some")
        promise(not any(child.is_resident for child in block.children.values()), "a descendant has pages")
        full = {group for group, window in enumerate(windows) if window is None}
        promise(full <= block.images.keys(), "a block without pages lacks an image")
        promise(bool(block.images or block.children), "a known block without pages, images or descendants")
        promise(block not in self.engine.reclaimer.order, "a block without pages can be evicted")
        self.reached["block in host memory"] += 1
        return self._check_checkpoint(block, kv, set())

    def _check_checkpoint(self, block: Block, kv: int, pages: set[int]) -> int:
        """Check the state that is kept after a block, as `_check_block`."""
        if (checkpoint := block.checkpoint) is None:
            return 0
        if not checkpoint.pages:
            promise(bool(checkpoint.images), "a checkpoint without pages or images")
            self.reached["checkpoint in host memory"] += 1
            return 0
        held, kinds = checkpoint.pages, {self.engine.pool.kind(page) for page in checkpoint.pages}
        self.reached["checkpoint"] += 1
        memory, layout = self.executor.memory, self.executor.layout
        promise(state_in(memory, layout, held, checkpoint.accepted) == kv, "another state is kept")
        self.reached["checkpoint after accepted drafts"] += checkpoint.accepted > 0
        promise(len(kinds) == 1 and kinds <= {PageKind.KV, PageKind.CACHED}, "a checkpoint's pages are of other kinds")
        promise(not pages.intersection(held), "a checkpoint's pages are a block's, too")
        pages.update(held)
        is_unused = kinds == {PageKind.CACHED}
        promise((checkpoint in self.engine.reclaimer.order) == is_unused, "a checkpoint can be evicted, or can't")
        return len(held) * is_unused
