"""A step's page lists as FlashInfer reads them: written on the host without a loop over pages, sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 32  # int32 elements: parts begin on 128 bytes


class PlanBuffers:
    """Static int32 buffers, once in page-locked memory (`on_host`) and once on the device (`on_device`).

    On both: `indptr [max_rows + 1]`, `last_page_len [max_rows]` and `indices`, which row i's pages
    `indices[indptr[i]:indptr[i+1]]` are in. On the host alone: `qo_indptr` and `prefill_indptr`, of a step's prefill
    rows; `host_indptr` is then of the rows behind them, whose pages follow those of the prefill rows.
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

    def write(
        self,
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        num_prefills: int = 0,
        qo_indptr: Sequence[int] = (),
    ) -> int:
        """Write a step's rows into host memory, whose last copy must be done. Returns the prefill rows' page count.

        page_table: `[rows, max_pages]` int64 in host memory. ValueError where a row has no token or too many pages, or
        the step too many rows.
        """
        rows = len(kv_lens)
        if page_table.device.type != "cpu":
            raise ValueError(f"page_table is on {page_table.device}; a plan reads it in host memory")
        if rows > self._max_rows:
            raise ValueError(f"the step has {rows} rows, the buffers have room for {self._max_rows}")
        lens = np.asarray(kv_lens, dtype=np.int64)
        counts = -(-lens // self._block_tokens)
        width = page_table.shape[1]
        if rows and (lens.min() < 1 or counts.max() > width):
            raise ValueError(f"rows have {lens.min()} to {lens.max()} tokens, a page table row {width} pages")
        ends = np.cumsum(counts)
        total = int(ends[-1]) if rows else 0
        if total > len(self._indices):
            raise ValueError(f"the step has {total} pages, the buffers have room for {len(self._indices)}")
        # page j of row i lies at i · width + j of the table and at ends[i] - counts[i] + j of the list
        places = np.repeat(np.arange(rows) * width - (ends - counts), counts) + np.arange(total)
        self._indices[:total] = page_table.contiguous().view(-1).numpy()[places]
        self._last[:rows] = lens - (counts - 1) * self._block_tokens
        split = int(ends[num_prefills - 1]) if num_prefills else 0
        self._indptr[0] = 0
        self._indptr[1 : rows - num_prefills + 1] = ends[num_prefills:] - split
        if num_prefills:
            self.prefill_indptr.numpy()[1 : num_prefills + 1] = ends[:num_prefills]
            self.qo_indptr.numpy()[: num_prefills + 1] = qo_indptr[: num_prefills + 1]
        self.num_indices = total
        return split

    def upload(self) -> None:
        """Start the one copy to the device of what is written."""
        used = self._first + self.num_indices
        self.on_device[:used].copy_(self.on_host[:used], non_blocking=True)
