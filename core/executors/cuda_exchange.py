"""A GPU as rank 0 of exchanges to processes of its host, for which the host never waits (CaraServe §4.2).

The compute stream is given an exchange before any of it has run: the rows x go to pinned memory, then the sum's number
to the GPU's word; the base product runs meanwhile; the stream writes its word again, waits until every process's word
has that number, and copies the products back. For a process that is as if rank 0 were of the host
(`ops/native/offload.h`).

Why each reads the right bytes. A stream does its work in order, and a write of a value comes after all writes before
it: a process that sees the number sees x. It writes its word after its products, so they are there when the wait ends.
The next x is copied after that wait, when every process has read this one, and the next products are written after the
next number, which follows the copy of these. What is to be computed stands in memory that is written once a step.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence

import numpy as np
import torch

from ...memory.transfers.cuda_driver import CupyDriver
from ...ops.lora_offload import EXCHANGES_BYTES, group_widths, input_dtype, row_elems
from ...ops.native_descriptors import EXCHANGE, MAX_EXCHANGES
from ...ops.ranks import Ranks, RanksLost

_MASK = 0xFFFFFFFF


class CudaExchange:
    """The GPU's side. One thread at a time, but for `is_stuck` and `give_up`, which another one calls.

    is_given_up: products that came back since are void.
    """

    def __init__(
        self,
        ranks: Ranks,
        exchanges: int,
        driver: CupyDriver,
        shapes: tuple[int, int, int, int],
        dtype: torch.dtype,
        most_rows: int,
        device: torch.device,
    ) -> None:
        """ranks: of rank 0, in pinned memory. exchanges: see `OffloadedSegments`. shapes: see `OffloadWorker`; dtype:
        of the model.
        """
        self._ranks, self._driver, self._widths = ranks, driver, group_widths(shapes)
        memory = (ctypes.c_uint8 * EXCHANGES_BYTES).from_address(exchanges)
        self._exchanges = np.ctypeslib.as_array(memory).view(EXCHANGE)
        inputs = input_dtype(dtype)
        self._x_elems = [row_elems(inputs, width) for width, _ in self._widths]
        self._y_elems = [row_elems(torch.float32, width) for _, width in self._widths]
        self._x = torch.zeros(most_rows * max(self._x_elems), dtype=inputs, device=device)
        self._y = torch.zeros(most_rows * max(self._y_elems), device=device)
        self._words = [ctypes.c_int64.from_address(ranks.word(rank)) for rank in range(ranks.size)]
        self._number = 0  # of the last sum that was launched
        self._seen: list[int] = []  # the words when they were last looked at
        self._moved = 0.0  # when they changed
        self.is_given_up = False

    def input_rows(self, group: int, rows: int) -> torch.Tensor:
        """Rows `[rows, in]` on the device, to be written before they are lent."""
        elems = self._x_elems[group]
        return self._x[: rows * elems].view(rows, elems)[:, : self._widths[group][0]]

    def offload(self, group: int, layer: int, active: Sequence[int], rows: int) -> None:
        """Hand `rows` of the `input_rows` over, once the compute stream's work so far is done.

        active: the lent segments of which they are.
        """
        driver, ranks, stream = self._driver, self._ranks, self._driver.compute_stream()
        asked = self._exchanges[ranks.num_sums // 2 % MAX_EXCHANGES]
        asked["layer"], asked["group"] = layer, group
        asked["active"][:] = 0
        asked["active"][list(active)] = 1
        number = ranks.count()
        if ranks.num_sums == 1:
            self._words[0].value = number - 1  # the stream writes the lower half alone
        self._number = number
        num_bytes = rows * self._x_elems[group] * self._x.itemsize
        driver.memcpy_async(ranks.part(0), self._x.data_ptr(), num_bytes, False, stream)
        driver.write_value(stream, ranks.word(0), number & _MASK)

    def collect(self, group: int, share: Sequence[int]) -> torch.Tensor:
        """The products `[rows, out]` float32 of the last exchange, which are there for what is launched from now on.

        share: see `OffloadedSegments`.
        """
        driver, ranks, stream = self._driver, self._ranks, self._driver.compute_stream()
        self._number = number = ranks.count()
        driver.write_value(stream, ranks.word(0), number & _MASK)
        for rank in range(1, ranks.size):
            driver.wait_value(stream, ranks.word(rank), number & _MASK)
        elems = self._y_elems[group]
        row_bytes = elems * self._y.itemsize
        for rank, (begin, end) in enumerate(itertools.pairwise(share), 1):
            if begin < end:
                target = self._y.data_ptr() + begin * row_bytes
                driver.memcpy_async(target, ranks.part(rank), (end - begin) * row_bytes, True, stream)
        return self._y[: share[-1] * elems].view(share[-1], elems)[:, : self._widths[group][1]]

    def is_stuck(self, patience: float) -> bool:
        """True if the device waits for a process that has ended, or if nothing of what was launched has gone on for
        `patience` seconds; to be asked again and again.
        """
        words, now = [word.value for word in self._words], time.monotonic()
        if words != self._seen or min(words) >= self._number:
            self._seen, self._moved = words, now
        if min(words) >= self._number:
            return False
        try:
            self._ranks.check()
        except RanksLost:
            return True
        return now - self._moved > patience

    def give_up(self) -> None:
        """Let the device go on without the processes, all of which have ended."""
        self.is_given_up = True
        for word in self._words[1:]:
            word.value = self._number
