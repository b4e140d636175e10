"""Attention of a model whose layers have several page groups.

Tests: tests/ops/attention/test_attention_groups.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from .attention import Attention, PlannedRows
from .blocks import BlockSpans


class GroupTable(Sequence[int]):
    """A group's pages in a block table that has a page of each group for every block. Equal to another of the same
    group if both are of the same list, which only grows.
    """

    __slots__ = ("_count", "_group", "_pages")

    def __init__(self, pages: Sequence[int], group: int, count: int) -> None:
        self._pages, self._group, self._count = pages, group, count

    def __len__(self) -> int:
        return len(self._pages) // self._count

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return [self._pages[block * self._count + self._group] for block in range(*at.indices(len(self)))]
        return self._pages[range(len(self))[at] * self._count + self._group]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupTable) and self._pages is other._pages and self._group == other._group

    __hash__ = None  # type: ignore[assignment]


class GroupedAttention:
    """Attention of a model whose layers have several page groups: each group has attention of its own."""

    __slots__ = ("_block_tokens", "_chunked", "_groups")

    def __init__(
        self, groups: Sequence[tuple[Attention, int | None]], block_tokens: int, *, chunked: bool = False
    ) -> None:
        """groups: attention and window of each. chunked: windows begin at multiples of their lengths, which are
        multiples of `block_tokens`.
        """
        self._groups, self._block_tokens, self._chunked = groups, block_tokens, chunked

    def plan(
        self,
        qo_indptr: Sequence[int],
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]] | None = None,
        blocks: BlockSpans | None = None,
    ) -> None:
        """See `Attention.plan`. page_table: `[rows, max_pages]`, a page of each group for every block.

        A group with a window is given only the blocks that its rows see: pages before it may have been freed. A
        row of several chunks becomes one of each.
        """
        count = len(self._groups)
        if count == 1 and self._groups[0][1] is None:
            self._groups[0][0].plan(qo_indptr, page_table, kv_lens, tables, blocks=blocks)
            return
        for index, (attention, window) in enumerate(self._groups):
            own = None if tables is None or window is not None else [GroupTable(each, index, count) for each in tables]
            rows = PlannedRows(qo_indptr, page_table[:, index::count], kv_lens, own, blocks=blocks)
            if window is not None:
                rows = (rows.in_chunks if self._chunked else rows.seen)(window, self._block_tokens)
            attention.plan(*rows)

    def of(self, group: int) -> Attention:
        """The attention of a group."""
        return self._groups[group][0]
