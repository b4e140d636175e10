"""A step's vectors in static buffers, where the kernel of `vectors_triton` reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..table_records import Copy, TableRecords
from .sgmv import AdapterRows, Segments
from .sgmv_tables import TablesFull


class VectorTables:
    """Buffers that never move: a captured launch reads the data of the last `plan`.

    applied, undone: int32 `[tokens]`, the table row of the vectors of each token, -1: none
    first:           int64 `[table_rows, layers, modules]`, the float32 value of the adapter where a module's scales
                     begin, -1: it has none
    pages:           int32 `[table_rows, max_pages]`, the adapter's pages in the arena
    """

    def __init__(
        self,
        table_rows: int,
        layers: int,
        max_pages: int,
        tokens: int,
        device: torch.device | str = "cpu",
        *,
        modules: int,
        itemsize: int,
        usual_rows: int | None = None,
        make_copy: Callable[[int], Copy] = lambda num_bytes: torch.Tensor.copy_,
    ) -> None:
        """modules: of the model. itemsize: bytes of an adapter's element. usual_rows, make_copy: see `SgmvTables`."""
        self._per_value = 4 // itemsize  # elements
        self.first = torch.full((table_rows, layers, modules), -1, dtype=torch.int64, device=device)
        self.pages = torch.zeros((table_rows, max_pages), dtype=torch.int32, device=device)
        self._of_tokens = torch.full((2, -(-tokens // 4) * 4), -1, dtype=torch.int32, device=device)
        self.applied, self.undone = self._of_tokens
        self._table_rows: dict[AdapterRows, int] = {}  # least recently used first
        self._planned: tuple[Segments, int] | None = None
        self._records = TableRecords((self.first,), usual_rows or table_rows, make_copy, last=self.pages)
        self._copies = [make_copy(each.numel() * each.itemsize) for each in self._of_tokens]
        self._used = [0, 0]  # tokens of `applied` and `undone` that the last step wrote

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        tables = self.first, self.pages, self._of_tokens
        return sum(table.numel() * table.itemsize for table in tables) + self._records.num_bytes

    def plan(self, segments: Segments) -> None:
        """Write a step's tables; does nothing if they are those of the last step, or there are no vectors."""
        key = segments, len(segments.rows)  # adding entries makes them different
        if not segments.vectors or (
            self._planned is not None and key[0] is self._planned[0] and key[1] == self._planned[1]
        ):
            return
        self._planned = None
        used = [segments.rows[index] for index in segments.vectors]
        self._assign(used)
        for is_undone, target in enumerate(self._of_tokens):
            entries = [
                (segments.begin[index], segments.end[index], self._table_rows[rows])
                for index, rows in zip(segments.vectors, used, strict=True)
                if int(rows.scale < 0) == is_undone
            ]
            last = max((end for _, end, _ in entries), default=0)
            of_tokens = np.full(max(last, self._used[is_undone]), -1, np.int32)
            for begin, end, table_row in entries:
                of_tokens[begin:end] = table_row
            if len(of_tokens):
                self._copies[is_undone](target[: len(of_tokens)], torch.from_numpy(of_tokens))
            self._used[is_undone] = last
        self._planned = key

    def _assign(self, used: Sequence[AdapterRows]) -> None:
        """Give each of `used` a table row: a free one, or the longest unused one that the step doesn't use."""
        fresh = [rows for rows in dict.fromkeys(used) if rows not in self._table_rows]
        for rows in used:
            if rows in self._table_rows:
                self._table_rows[rows] = self._table_rows.pop(rows)
        keep, most = set(used), len(self.first)
        if len(keep) > most:
            raise TablesFull(f"the step has {len(keep)} adapters with vectors, but the tables have {most} rows")
        idle = [rows for rows in self._table_rows if rows not in keep]
        for rows in fresh:
            free = len(self._table_rows)
            self._table_rows[rows] = free if free < most else self._table_rows.pop(idle.pop(0))
        if fresh:
            self._records.write([self._table_rows[rows] for rows in fresh], [self._entries(rows) for rows in fresh])

    def _entries(self, rows: AdapterRows) -> tuple[np.ndarray, np.ndarray]:
        """An adapter's rows of `first` and `pages`."""
        assert rows.vectors is not None
        first = np.full(self.first.shape[1:], -1, np.int64)
        # those behind are of experts, without vectors
        places = np.array(rows.vectors, np.int64)[:, : self.first.shape[2]]
        first[:, : places.shape[1]] = np.where(places < 0, -1, places // self._per_value)
        return first, np.array(rows.pages, np.int32)
