"""A step's page lists in FlashInfer's form: written without a loop over pages, sent in one copy, and kept between steps
if sequences only grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 32  # int32 elements: parts begin at multiples of 128 bytes


class PlanBuffers:
    """Static int32 buffers, in page-locked host memory (`on_host`) and on the device (`on_device`).

    On both: `indptr [max_rows + 1]`, `last_page_len [max_rows]` and `indices`; the pages of sequence i are
    `indices[indptr[i]:indptr[i+1]]`. Only on the host: `qo_indptr` and `prefill_indptr`, for the prefill chunks of a
    step; then `host_indptr` covers the sequences after them, whose pages follow those of the chunks.
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
        self._tables: list[Sequence[int]] | None = None  # of the sequences in the list, if known
        self._counts, self._count_bytes = np.zeros(0, np.int64), b""  # pages of each sequence
        self._head = self.on_device[: self._first], self.on_host[: self._first]  # everything except the list
        self._is_new = False  # True until the device has the list

    def write(
        self,
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        num_prefills: int = 0,
        qo_indptr: Sequence[int] = (),
        tables: Sequence[Sequence[int]] | None = None,
    ) -> int:
        """Write a step's sequences into host memory, whose last copy must have ended; return the page count of the
        prefill chunks.

        page_table: `[rows, max_pages]` int64 in host memory. tables: the block tables of its rows, lists that only
        grow. If they are the same lists as in the last step, only new pages are written. Raises ValueError if a
        sequence has no token or too many pages, or if the step has too many sequences.
        """
        last = np.array(kv_lens, dtype=np.int64) - 1
        counts = last // self._block_tokens + 1
        is_same = tables is not None and tables == self._tables
        if is_same and counts.tobytes() == self._count_bytes:  # the usual case: no sequence got a page
            self._last[: len(last)] = last - (counts - 1) * self._block_tokens + 1
            return 0
        rows, width = len(kv_lens), page_table.shape[1]
        if page_table.device.type != "cpu":
            raise ValueError(f"page_table is on {page_table.device}; it must be in host memory")
        if rows > self._max_rows:
            raise ValueError(f"the step has {rows} sequences, but the buffers have room for {self._max_rows}")
        least, most = min(kv_lens, default=1), max(kv_lens, default=1)
        if least < 1 or most > width * self._block_tokens:
            raise ValueError(f"sequences have {least} to {most} tokens, but must fit in {width} pages")
        self._last[:rows] = last - (counts - 1) * self._block_tokens + 1
        if tables is not None and is_same and self._grow(counts, tables):
            return 0
        total = int(counts.sum())
        if total > len(self._indices):
            raise ValueError(f"the step has {total} pages, but the buffers have room for {len(self._indices)}")
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
        """Insert the pages that the same sequences got since the last step; return False if that is impossible."""
        more = counts - self._counts
        grown = more.nonzero()[0]
        if not len(grown):
            return True
        end, shift = self.num_indices, int(more.sum())
        if more.min() < 0 or end + shift > len(self._indices):  # the plan of an earlier step, or too many pages
            return False
        self.num_indices += shift
        for row in grown[::-1].tolist():  # last to first, so nothing is overwritten
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
        """Start the single copy of the new data to the device; page lists that are already there are left out."""
        on_device, on_host = self._head
        if self._is_new:
            used = self._first + self.num_indices
            on_device, on_host = self.on_device[:used], self.on_host[:used]
        on_device.copy_(on_host, non_blocking=True)
        self._is_new = False
