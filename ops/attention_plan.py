"""A step's page lists as FlashInfer reads them: written on the host without a loop over pages, sent in one copy, and
kept from step to step where rows only grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 32  # int32 elements: parts begin on 128 bytes


class PlanBuffers:
    """Static int32 buffers, once in page-locked memory (`on_host`) and once on the device (`on_device`).

    On both: `indptr [max_rows + 1]`, `last_page_len [max_rows]` and `indices`: row i's pages are
    `indices[indptr[i]:indptr[i+1]]`. On the host alone: `qo_indptr` and `prefill_indptr`, of a step's prefill rows;
    `host_indptr` then covers the rows after them, with pages after the prefill rows' pages.
    """

    def __init__(self, max_rows: int, max_pages_per_row: int, block_tokens: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self._max_rows = max_rows
        part = -(-(max_rows + 1) // _ALIGN) * _ALIGN
        capacity = max_rows * max_pages_per_row
        pinned = device.type == "cuda"
        self.on_host = torch.zeros(2 * part + capacity, dtype=torch.int32, pin_memory=pinned)
        self.on_device = torch.zeros(2 * part + capacity, dtype=torch.int32, device=device)
        self._first = 2 * part
        self.host_indptr, self.host_last_page_len = self.on_host[:part], self.on_host[part : 2 * part]
        self.indptr, self.last_page_len = self.on_device[:part], self.on_device[part : 2 * part]
        self.indices = self.on_device[2 * part :]
        self.qo_indptr, self.prefill_indptr = torch.zeros(2, part, dtype=torch.int32, pin_memory=pinned).unbind(0)
        self._indptr, self._last, self._indices = (
            view.numpy() for view in (self.host_indptr, self.host_last_page_len, self.on_host[2 * part :])
        )
        self.num_indices = 0
        self._tables: list[Sequence[int]] | None = None  # of the rows that the list holds, where they are known
        self._counts, self._count_bytes = np.zeros(0, np.int64), b""  # pages of each row
        self._head = self.on_device[: self._first], self.on_host[: self._first]  # all but the list
        self._is_new = False  # True while the device does not have the list

    def write(
        self,
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        num_prefills: int = 0,
        qo_indptr: Sequence[int] = (),
        tables: Sequence[Sequence[int]] | None = None,
    ) -> int:
        """Write a step's rows into host memory; its last copy must have ended. Return the prefill rows' page count.

        page_table: `[rows, max_pages]` int64 in host memory. tables: the block tables that its rows hold, lists that
        only ever grow: if they are the last step's, only new pages are written. ValueError if a row has no token or too
        many pages, or the step too many rows.
        """
        last = np.array(kv_lens, dtype=np.int64) - 1
        counts = last // self._block_tokens + 1
        is_same = tables is not None and tables == self._tables
        if is_same and counts.tobytes() == self._count_bytes:  # as in most steps: no row has got a page
            self._last[: len(last)] = last - (counts - 1) * self._block_tokens + 1
            return 0
        rows, width = len(kv_lens), page_table.shape[1]
        if page_table.device.type != "cpu":
            raise ValueError(f"page_table is on {page_table.device}; a plan reads it in host memory")
        if rows > self._max_rows:
            raise ValueError(f"the step has {rows} rows, the buffers have room for {self._max_rows}")
        least, most = min(kv_lens, default=1), max(kv_lens, default=1)
        if least < 1 or most > width * self._block_tokens:
            raise ValueError(f"rows have {least} to {most} tokens, a page table row {width} pages")
        self._last[:rows] = last - (counts - 1) * self._block_tokens + 1
        if tables is not None and is_same and self._grow(counts, tables):
            return 0
        total = int(counts.sum())
        if total > len(self._indices):
            raise ValueError(f"the step has {total} pages, the buffers have room for {len(self._indices)}")
        self._tables = None if tables is None else list(tables)
        self._keep(counts)
        ends = np.cumsum(counts)
        # page j of row i lies at i · width + j of the table and at ends[i] - counts[i] + j of the list
        places = np.repeat(np.arange(rows) * width - (ends - counts), counts) + np.arange(total)
        self._indices[:total] = page_table.contiguous().view(-1).numpy()[places]
        split = int(ends[num_prefills - 1]) if num_prefills else 0
        self._indptr[0] = 0
        self._indptr[1 : rows - num_prefills + 1] = ends[num_prefills:] - split
        if num_prefills:
            self.prefill_indptr.numpy()[1 : num_prefills + 1] = ends[:num_prefills]
            self.qo_indptr.numpy()[: num_prefills + 1] = qo_indptr[: num_prefills + 1]
        self.num_indices = total
        return split

    def _grow(self, counts: np.ndarray, tables: Sequence[Sequence[int]]) -> bool:
        """Add to the list the pages that the same rows have got since the last step; False where it can't be."""
        more = counts - self._counts
        grown = more.nonzero()[0]
        if not len(grown):
            return True
        end, shift = self.num_indices, int(more.sum())
        if more.min() < 0 or end + shift > len(self._indices):  # a former step's plan, or too many
            return False
        self.num_indices += shift
        for row in grown[::-1].tolist():  # from the last to the first, so that nothing is written over
            behind, added, had = int(self._indptr[row + 1]), int(more[row]), int(self._counts[row])
            self._indices[behind + shift : end + shift] = self._indices[behind:end]
            self._indices[behind + shift - added : behind + shift] = tables[row][had : had + added]
            end, shift = behind, shift - added
        np.cumsum(counts, out=self._indptr[1 : len(counts) + 1], dtype=np.int32)
        self._keep(counts)
        return True

    def _keep(self, counts: np.ndarray) -> None:
        self._counts, self._count_bytes, self._is_new = counts, counts.tobytes(), True

    def upload(self) -> None:
        """Start the one copy to the device of what is written; page lists that are there already are left out."""
        on_device, on_host = self._head
        if self._is_new:
            used = self._first + self.num_indices
            on_device, on_host = self.on_device[:used], self.on_host[:used]
        on_device.copy_(on_host, non_blocking=True)
        self._is_new = False
