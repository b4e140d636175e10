"""The GPU as rank 0 of exchanges with offload workers, without the host ever waiting for them (CaraServe §4.2).

The host launches an exchange on the compute stream before any of it has run. The rows x go to pinned memory, then the
number of the collective goes to the GPU's word. The base GEMM runs meanwhile. The stream then writes its word again,
waits until every worker's word has that number, and copies the LoRA terms back. To a worker, the GPU looks like a rank
0 on the host (`ops/native/lora/offload.h`).

Each side reads the right bytes, for these reasons. A stream works in order, and it writes a value after all earlier
writes: a worker that sees the number also sees x. A worker writes its word after its LoRA terms, so they are present
when the wait ends. The next x is copied after that wait, when every worker has read the present one. The next LoRA
terms are written after the next number, which follows the copy of the present ones. The description of the work is in
memory that is written once per step.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch

from ...memory.transfers.cuda_driver import CupyDriver
from ...ops.cpu.lora_offload import exchanges_at, gemm_widths, input_dtype, row_elems
from ...ops.library.native_descriptors import GemmShape
from ...ops.ranks.ranks import Ranks

_MASK = 0xFFFFFFFF


class CudaExchange:
    """The GPU's side of exchanges. One thread at a time may use it."""

    def __init__(
        self,
        ranks: Ranks,
        exchanges: int,
        driver: CupyDriver,
        gemm_shapes: Sequence[GemmShape],
        dtype: torch.dtype,
        most_rows: int,
        device: torch.device,
    ) -> None:
        """ranks: of rank 0, in pinned memory. exchanges: see `OffloadedSegments`. gemm_shapes, dtype: the model's."""
        self._ranks, self._driver, self._widths = ranks, driver, gemm_widths(gemm_shapes)
        self._exchanges = exchanges_at(exchanges)
        inputs = input_dtype(dtype)
        self._x_elems = [row_elems(inputs, width) for width, _ in self._widths]
        self._y_elems = [row_elems(torch.float32, width) for _, width in self._widths]
        self._x = torch.zeros(most_rows * max(self._x_elems), dtype=inputs, device=device)
        self._y = torch.zeros(most_rows * max(self._y_elems), device=device)
        self._word = ctypes.c_int64.from_address(ranks.word(0))

    def input_rows(self, shape: int, rows: int) -> torch.Tensor:
        """Rows `[rows, in]` on the device, to be written before they are offloaded."""
        elems = self._x_elems[shape]
        return self._x[: rows * elems].view(rows, elems)[:, : self._widths[shape][0]]

    def offload(self, shape: int, layer: int, active: Sequence[int], rows: int) -> None:
        """Send `rows` of the `input_rows` to the workers, once the compute stream's work so far is done.

        active: the offloaded segments that the rows belong to.
        """
        driver, ranks, stream = self._driver, self._ranks, self._driver.compute_stream()
        asked = self._exchanges[ranks.num_sums // 2 % len(self._exchanges)]
        asked["layer"], asked["shape"] = layer, shape
        asked["active"][:] = 0
        asked["active"][list(active)] = 1
        number = ranks.count()
        if ranks.num_sums == 1:
            self._word.value = number - 1  # the stream writes only the lower half
        num_bytes = rows * self._x_elems[shape] * self._x.itemsize
        driver.memcpy_async(ranks.part(0), self._x.data_ptr(), num_bytes, False, stream)
        driver.write_value(stream, ranks.word(0), number & _MASK)

    def collect(self, shape: int, share: Sequence[int]) -> torch.Tensor:
        """Return the LoRA terms `[rows, out]` float32 of the last exchange, valid for work launched from now on.

        share: see `OffloadedSegments`.
        """
        driver, ranks, stream = self._driver, self._ranks, self._driver.compute_stream()
        number = ranks.count()
        driver.write_value(stream, ranks.word(0), number & _MASK)
        for rank in range(1, ranks.size):
            driver.wait_value(stream, ranks.word(rank), number & _MASK)
        elems = self._y_elems[shape]
        row_bytes = elems * self._y.itemsize
        for rank, (begin, end) in enumerate(itertools.pairwise(share), 1):
            if begin < end:
                target = self._y.data_ptr() + begin * row_bytes
                driver.memcpy_async(target, ranks.part(rank), (end - begin) * row_bytes, True, stream)
        return self._y[: share[-1] * elems].view(share[-1], elems)[:, : self._widths[shape][1]]
