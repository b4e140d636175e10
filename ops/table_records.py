"""New rows of several tables on the device: collected on the host, sent in one copy, and distributed there.

Tests: tests/ops/lora/test_sgmv_tables.py, tests/ops/lora/test_vectors_triton.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

#: Copies host values (second) into a device tensor (first); the values may change once it returns.
Copy = Callable[[torch.Tensor, torch.Tensor], object]


class TableRecords:
    """Writes rows of tables that share their row numbers.

    A record has its row number and one row of each table. It is sent only as long as it is: of the last table, the
    columns that a value of `write` has. Memory is that of `usual` whole records, on the device and twice on the host;
    more are sent in several copies, each of which waits for the last but one.
    """

    def __init__(
        self, tables: Sequence[torch.Tensor], usual: int, make_copy: Callable[[int], Copy], last: torch.Tensor
    ) -> None:
        """tables: int64 or int32 `[rows, …]`; last: int32 `[rows, columns]`. make_copy: returns a function that copies
        up to the given number of bytes from the host to the device.
        """
        self._tables, self._last = tables, last
        # in 32-bit words; row numbers are 64-bit values
        widths = [2, *(table[0].numel() * table.itemsize // 4 for table in tables)]
        ends = np.cumsum(widths).tolist()
        self._parts = [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
        self._begin = ends[-1]  # of the last table's part
        words = max(1, usual) * self._width(last.shape[1])
        self._device = torch.empty(words, dtype=torch.int32, device=last.device)
        self._copy = make_copy(words * self._device.itemsize)

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        return self._device.numel() * self._device.itemsize

    def write(self, rows: Sequence[int], values: Sequence[Sequence[np.ndarray]]) -> None:
        """Write a row of each table, the last included, for every row number."""
        columns = max(len(of_row[-1]) for of_row in values)
        width = self._width(columns)
        most = self._device.numel() // width
        for begin in range(0, len(rows), most):
            self._send(rows[begin : begin + most], values[begin : begin + most], width)

    def _send(self, rows: Sequence[int], values: Sequence[Sequence[np.ndarray]], width: int) -> None:
        numbers, *parts = self._parts
        host = np.zeros((len(rows), width), dtype=np.int32)
        for record, row, of_row in zip(host, rows, values, strict=True):
            record[numbers].view(np.int64)[:] = row
            for part, value in zip(parts, of_row, strict=False):
                record[part].view(value.dtype)[:] = value.reshape(-1)
            record[self._begin : self._begin + len(of_row[-1])] = of_row[-1]
        device = self._device[: host.size].view(host.shape)
        self._copy(device, torch.from_numpy(host))
        at = device[:, numbers].view(torch.int64)[:, 0]
        for table, part in zip(self._tables, parts, strict=True):
            table.index_copy_(0, at, device[:, part].view(table.dtype).view(-1, *table.shape[1:]))
        columns = min(width - self._begin, self._last.shape[1])
        self._last[:, :columns].index_copy_(0, at, device[:, self._begin : self._begin + columns])

    def _width(self, columns: int) -> int:
        """Words of a record, an even number of them: row numbers lie on 8 bytes."""
        return -(-(self._begin + columns) // 2) * 2


def copy_in_parts(copy: Copy, target: torch.Tensor, values: torch.Tensor, most: int) -> None:
    """Copy so many rows at a time."""
    for begin in range(0, len(values), most):
        copy(target[begin : begin + most], values[begin : begin + most])
