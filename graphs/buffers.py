"""The static tensors that captured decode steps read: allocated once, filled before every replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from .device import Blocks, CudaDevice, DeviceUpload

#: Columns begin at multiples of 16 bytes, so kernels compiled for that alignment are right for every bucket.
_ALIGN = 2


@dataclass(slots=True)
class DecodeViews:
    """One bucket's slices of the static buffers; every entry is one token.

    If sequences have several tokens, the first rows of `page_table` are the sequences'.
    """

    token_ids: torch.Tensor
    """`[bucket]` int64, as are positions and offset."""
    positions: torch.Tensor
    offset: torch.Tensor
    page: torch.Tensor
    """`[page groups, bucket]` int64."""
    page_table: torch.Tensor
    """`[bucket, max_pages]` int64, block by block."""
    kv_lens: list[int]
    """`[bucket]` integers on the host, updated in place by `fill`; of each sequence, if some have several tokens."""
    tables: list[Sequence[int]]
    """The block table of each entry, updated in place by `fill`; of each sequence, if some have several tokens."""


def column_width(tokens: int) -> int:
    """Elements of a column with room for `tokens`."""
    return -(-tokens // _ALIGN) * _ALIGN


def num_columns(groups: int) -> int:
    """Per-token columns of a step: token ids, positions, offsets in a page, and a page of each page group."""
    return 3 + groups


def split_columns(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions, offsets and pages from `[num_columns, tokens]`; pages are `[groups, tokens]`."""
    return columns[0], columns[1], columns[2], columns[3:]


class DecodeBuffers:
    """Static decode inputs at the largest bucket's size; smaller buckets use the first entries.

    Entries beyond the step's are padding: token 0 at position 0 in the dummy page, so they read and write only that
    page.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        max_pages_per_row: int,
        block_tokens: int,
        dummy_page: int,
        groups: int = 1,
    ) -> None:
        """groups: page groups, each of which has a page in every block of a block table."""
        largest = max(sizes)
        self._block_tokens = block_tokens
        self._dummy_page = dummy_page
        self._groups = groups
        self._padding = [[0], [0], [0], *([dummy_page] for _ in range(groups))]
        self._vectors = torch.zeros(num_columns(groups), largest, dtype=torch.long)
        self.columns = self._vectors.numpy()  # the same memory: writing a few numbers through torch is slow
        self._page_table = torch.full((largest, max_pages_per_row), dummy_page, dtype=torch.long)
        self._table = self._page_table.numpy()
        self._tables: list[Sequence[int]] = [()] * largest  # of each entry, as in the page table
        self._lengths = [0] * largest  # the number of pages copied for each entry
        self.views: dict[int, DecodeViews] = {}
        for size in sizes:
            self.view(size)

    def view(self, bucket: int) -> DecodeViews:
        """Return the views of any number of entries up to the largest bucket's."""
        if (found := self.views.get(bucket)) is None:
            found = self.views[bucket] = DecodeViews(
                *split_columns(self._vectors[:, :bucket]),
                page_table=self._page_table[:bucket],
                kv_lens=[1] * bucket,
                tables=[()] * bucket,
            )
        return found

    def fill(
        self,
        bucket: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        lengths: Sequence[int] | None = None,
        *,
        shifts: Sequence[int] = (),
    ) -> DecodeViews:
        """Write a step's entries into `bucket`'s views, pad the rest, and return the views.

        positions: of the tokens in their sequences. block_tables: of the sequences. lengths: tokens of each; by default
        each has one. shifts: what is added to the positions by which heads are rotated; empty: nothing.
        """
        return self.write(self.columns, bucket, token_ids, positions, block_tables, lengths=lengths, shifts=shifts)

    def write(
        self,
        columns: np.ndarray,
        bucket: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        lengths: Sequence[int] | None = None,
        *,
        shifts: Sequence[int] = (),
    ) -> DecodeViews:
        """Like `fill`, but write the per-token vectors into `columns`, int64 `[num_columns, bucket or more]`."""
        views, block_tokens, used, groups = self.view(bucket), self._block_tokens, len(token_ids), self._groups
        of_tokens, lasts = block_tables, positions
        if lengths is not None:
            of_tokens = [table for table, length in zip(block_tables, lengths, strict=True) for _ in range(length)]
            lasts = [positions[end - 1] for end in accumulate(lengths)]
        if used < bucket:
            columns[:, used:bucket] = self._padding
        firsts = [position // block_tokens * groups for position in positions]
        columns[:, :used] = (
            token_ids,
            positions,
            [position % block_tokens for position in positions],
            *(
                [table[first + group] for table, first in zip(of_tokens, firsts, strict=True)]
                for group in range(groups)
            ),
        )
        if shifts:
            columns[1, :used] += shifts
        padding = bucket - used
        tables = [*block_tables, *([()] * padding)]
        self._fill_table(tables)
        views.kv_lens[:] = [last + 1 for last in lasts] + [1] * padding
        views.tables[:] = tables
        return views

    def _fill_table(self, tables: list[Sequence[int]]) -> None:
        """Copy new pages of the block tables into the page table: one row for each entry, or for each sequence."""
        lengths, rows = [len(table) for table in tables], len(tables)
        if lengths != self._lengths[:rows] or tables != self._tables[:rows]:
            for row, table in enumerate(tables):
                if self._tables[row] is not table or self._lengths[row] != lengths[row]:
                    self._fill_row(row, table)

    def _fill_row(self, row: int, table: Sequence[int]) -> None:
        """Copy the new pages of an entry's block table, and reset leftovers of an earlier step to the dummy page.

        A block table is a list that only grows: if it is the same list, only its new pages are copied.
        """
        used, copied = len(table), self._lengths[row]
        start = copied if self._tables[row] is table else 0
        if used > start:
            self._table[row, start:used] = table[start:]
        if copied > used:
            self._table[row, used:copied] = self._dummy_page
        self._tables[row], self._lengths[row] = table, used


class DeviceDecodeBuffers:
    """`DecodeBuffers` with per-token tensors on `device`; block tables and lengths stay on the host, where
    `attention.plan` reads them.

    The columns of a bucket are contiguous, so one copy fills them. All buckets use the same memory: a bucket's
    views are valid until another bucket is filled.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        max_pages_per_row: int,
        block_tokens: int,
        dummy_page: int,
        device: CudaDevice,
        groups: int = 1,
    ) -> None:
        widths = {size: column_width(size) for size in sizes}
        self._host = DecodeBuffers(sizes, max_pages_per_row, block_tokens, dummy_page, groups)
        count = num_columns(groups)
        values = torch.zeros(count * max(widths.values()), dtype=torch.long, device=device.torch_device)
        self._columns = {size: values[: count * width].view(count, width) for size, width in widths.items()}
        self._device = device
        self._blocks = Blocks(device, values.numel() * values.itemsize)
        self.views = {
            size: DecodeViews(
                *split_columns(self._columns[size][:, :size]),
                page_table=host.page_table,
                kv_lens=host.kv_lens,
                tables=host.tables,
            )
            for size, host in self._host.views.items()
        }

    def fill(
        self,
        bucket: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        shifts: Sequence[int] = (),
    ) -> DecodeViews:
        """Write a step's entries into `bucket`'s views, in stream order, and pad the rest. shifts: see
        `DecodeBuffers.fill`.
        """
        target = self._columns[bucket]
        staged, event = self._blocks.next(target.shape, target.dtype)
        event.synchronize()
        self._host.write(staged.numpy(), bucket, token_ids, positions, block_tables, shifts=shifts)
        self._device.copy(target, staged)
        event.record()
        return self.views[bucket]


class StaticColumns:
    """Int64 columns on a device, one after the other in memory that is allocated once. Steps of any number of columns
    and tokens use the same memory, in stream order.
    """

    def __init__(self, most: int, most_tokens: int, device: CudaDevice) -> None:
        """most: columns of a step. most_tokens: of a column."""
        self.values = torch.zeros(most * column_width(most_tokens), dtype=torch.long, device=device.torch_device)
        self._upload = DeviceUpload(device, self.values.numel() * self.values.itemsize)

    def view(self, count: int, tokens: int) -> torch.Tensor:
        """`[count, column_width(tokens)]`, contiguous."""
        width = column_width(tokens)
        return self.values[: count * width].view(count, width)

    def write(self, columns: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """Copy columns of at most `tokens` values in one copy, padded with zeros; return their view."""
        padded = torch.zeros(len(columns), column_width(tokens), dtype=torch.long)
        for target, values in zip(padded, columns, strict=True):
            target[: len(values)] = values
        static = self.view(*padded.shape)
        self._upload(static, padded)
        return static
