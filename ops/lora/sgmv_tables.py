"""A step's segments and adapters in static buffers, where the kernels of `sgmv_triton` read them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..table_records import Copy, TableRecords, copy_in_parts
from .sgmv import AdapterRows, Segments
from .sgmv_tiles import Run, cut, num_tiles, tile_runs

#: Columns of `SgmvTables.tiles`, 32 bytes: the tile's tokens and table row, and values that are the same in every
#: layer; then how many of the following tiles go on with this one, -1 if this one goes on with another or has no work.
BEGIN, END, TABLE_ROW, RANK, SLAB, SCALE, MORE = range(7)
TILE_WIDTH = 8

#: Rank-rows per record in `SgmvTables.places`: at least as many as a program of a decode launch reads at once.
PLACE_ROWS = 16

#: The most programs of a launch in the dimension of its tiles.
MAX_GRID = 65535

#: A record without work: tokens, table row, and `MORE`.
_IDLE = 0, 0, -1, -1

#: The most pages in a record; kernels choose among them in registers.
_PLACE_PAGES = 7


class TablesFull(ValueError):
    """The step has more adapters, tiles or terms than the tables hold; nothing was written. Fewer sequences may
    fit.
    """


class TableSizes(NamedTuple):
    """Room in `SgmvTables`."""

    table_rows: int
    layers: int
    max_pages: int
    """The most pages of an adapter."""
    max_rank: int
    max_tiles: int
    scratch: int
    """Elements of h for the largest launch, see `SgmvTables.scratch_elems`."""
    page_elems: int
    slab_elems: int
    """The most of an adapter."""
    modules: int
    """Projections of the model that adapters may change."""
    max_terms: int = 2
    """The most entries that a token may have on one module."""
    usual_rows: int | None = None
    """New table rows of one copy from the host. A step with more makes several copies. None: all of them."""
    usual_tiles: int | None = None
    """Tiles of one copy from the host, which have as many records as the tables have room for."""


class SgmvTables:
    """Buffers that never move: a captured launch reads the data of the last `plan`.

    The rank-rows of an adapter with one rank and scale have one table row. Its entries are written when the adapter
    gets the row, and stay while it is used. A step writes the table of tiles if it differs from the last one, and the
    entries of all new adapters in one copy. Thus a kernel needs three dependent loads: the tile; the adapter's offsets
    and places in a layer, in parallel; and the weights.

    Entries that change the same module of the same tokens are in one tile, with a record for each; see `sgmv_tiles`. A
    step's tiles have `terms` records each. Most steps have one.

    tiles:      int32 `[max_tiles · max_terms, TILE_WIDTH]`, the records of the first tile, then those of the next:
                tokens `begin … end` use `table_row` (-1: no work); then its rank, slab_elems and scale (the bits of a
                float32), and `MORE`
    offsets:    int32 `[table_rows, 2 · modules]`: every module's a_offset, then b_offset; -1 if it is not targeted
    first_elem: int64 `[table_rows, layers]`, where the layer's slabs begin in the adapter, -1 if it has none; an
                adapter of a large model has more elements than 32 bits can count
    places:     int32 `[table_rows, layers, blocks, 1 + pages]`: for every PLACE_ROWS rank-rows of a layer, where the
                first of them begins in a page (-1: the layer has none), then that page and the following pages. Only
                one column if a block may touch more pages than a record holds
    pages:      int32 `[table_rows, max_pages]`, the adapter's pages in the arena
    h:          float32, flat: the partial sums `[splits, tokens, modules, terms, max_rank]` between shrink and expand
    """

    def __init__(
        self,
        sizes: TableSizes,
        device: torch.device | str = "cpu",
        make_copy: Callable[[int], Copy] = lambda num_bytes: torch.Tensor.copy_,
    ) -> None:
        """make_copy: returns a function that copies up to the given number of bytes from the host to the device."""
        table_rows, layers, max_rank, max_tiles = sizes.table_rows, sizes.layers, sizes.max_rank, sizes.max_tiles
        self.max_rank = max_rank
        self.max_tiles = max_tiles
        self.max_terms = sizes.max_terms
        self.modules = sizes.modules
        # records are a multiple of 16 bytes, so the tiles after any others begin where wide loads may
        self.tiles = torch.full((max_tiles * sizes.max_terms, TILE_WIDTH), -1, dtype=torch.int32, device=device)
        self.terms = self.tail_tiles = 0  # of the last step planned
        self.offsets = torch.full((table_rows, 2 * sizes.modules), -1, dtype=torch.int32, device=device)
        self.first_elem = torch.full((table_rows, layers), -1, dtype=torch.int64, device=device)
        self.pages = torch.zeros((table_rows, sizes.max_pages), dtype=torch.int32, device=device)
        self.page_elems, self._slab_elems = sizes.page_elems, sizes.slab_elems
        self.place_pages = place_pages(sizes.page_elems, sizes.slab_elems)
        self.places = torch.full(
            (table_rows, layers, place_blocks(max_rank), 1 + self.place_pages), -1, dtype=torch.int32, device=device
        )
        self.h = torch.empty(sizes.scratch, dtype=torch.float32, device=device)
        tables = self.first_elem, self.offsets, self.places
        self._records = TableRecords(tables, sizes.usual_rows or table_rows, make_copy, last=self.pages)
        self._blocks, self._within = np.arange(self.places.shape[2]), np.arange(self.place_pages)
        self._of_table_row = np.zeros(
            (table_rows + 1, 3), dtype=np.int32
        )  # rank, slab_elems and scale, as tiles have them
        self._usual_records = min(max_tiles, sizes.usual_tiles or max_tiles) * sizes.max_terms
        self._copy = make_copy(self._usual_records * TILE_WIDTH * self.tiles.itemsize)
        self._table_rows: dict[AdapterRows, int] = {}  # least recently used first
        # the last segments, their key and tiles
        self._planned: tuple[Segments | None, tuple[int | None, ...], int] = None, (), 0
        self._present: list[tuple[int, int, int, int]] = []  # what `tiles` has, but for idle records at its end

    @staticmethod
    def scratch_elems(splits: int, tokens: int, modules: int, max_rank: int, terms: int = 1) -> int:
        """Elements of h. Its rows hold whole blocks of rank-rows, so a block is read without knowing the rank."""
        return splits * tokens * modules * terms * place_blocks(max_rank) * PLACE_ROWS

    @property
    def num_bytes(self) -> int:
        """Device memory, without the partial sums."""
        tables = self.tiles, self.offsets, self.first_elem, self.places, self.pages
        return sum(table.numel() * table.itemsize for table in tables) + self._records.num_bytes

    def plan(
        self,
        segments: Segments,
        tile_tokens: int,
        border: int = sys.maxsize,
        tail_tile: int = 1,
        tail_at: int | None = None,
        terms: int = 1,
    ) -> int:
        """Write a step's tables, with segments split into tiles of at most `tile_tokens` tokens.

        Returns the number of tiles; `self.terms` is the number of records of each, `terms` or more.

        Tokens from `border` on have their own tiles of at most `tail_tile` tokens. There are `tail_tiles` of them, not
        counted in the number returned. They are after the other tiles, and count tokens from the border. tail_at: begin
        them at this tile, if the others leave it free, and count tokens from the first.

        Further tiles are marked as empty, so launching more of them is correct. If the segments are those of the last
        step, the usual case, they are already written; adding entries makes them different.
        """
        key = len(segments.rows), tile_tokens, border, tail_tile, tail_at, terms
        if segments is self._planned[0] and key == self._planned[1]:
            return self._planned[2]
        self._planned = None, key, 0  # until everything is written
        runs, terms = tile_runs(segments, terms)
        if terms > self.max_terms:
            raise TablesFull(f"a token has {terms} entries on one module, the tables hold {self.max_terms}")
        heads = cut(runs, 0, border, tile_tokens)
        tails = cut(runs, border, sys.maxsize, tail_tile) if border < sys.maxsize else []
        count, self.tail_tiles = num_tiles(heads), num_tiles(tails)
        first_tail, origin = (count, border) if tail_at is None else (max(count, tail_at), 0)
        if (needed := first_tail + self.tail_tiles if tails else count) > self.max_tiles:
            raise TablesFull(f"the step has {needed} tiles, but the tables have room for {self.max_tiles}")
        moved = self._assign([rows for _, _, tiles in runs for tile in tiles for rows in tile if rows is not None])
        records = self._records_of(heads, 0)
        if tails:
            records += [_IDLE] * ((first_tail - count) * terms) + self._records_of(tails, origin)
        if records != self._present or (moved and records):
            idle = len(self._present) - len(records)
            table = np.zeros((len(records) + max(idle, 0), TILE_WIDTH), dtype=np.int32)
            table[:, [BEGIN, END, TABLE_ROW, MORE]] = records + [_IDLE] * idle
            table[:, RANK : SCALE + 1] = self._of_table_row[table[:, TABLE_ROW]]
            copy_in_parts(self._copy, self.tiles[: len(table)], torch.from_numpy(table), self._usual_records)
        self._present, self.terms = records, terms
        self._planned = segments, key, count
        return count

    def _records_of(self, runs: Sequence[Run], origin: int) -> list[tuple[int, int, int, int]]:
        """The values of tiles' records that are not those of the table row; tokens are counted from `origin`."""
        table_rows, records = self._table_rows, []
        for begin, end, tiles in runs:
            first, last, more = begin - origin, end - origin, len(tiles) - 1
            for tile in tiles:
                records += [(first, last, -1 if rows is None else table_rows[rows], more) for rows in tile]
                more = -1
        return records

    def leave_out(self, rows: AdapterRows, layer: int) -> None:
        """Hide a layer of a planned adapter from launches made from now on, as long as it keeps its table row."""
        table_row = self._table_rows[rows]
        self.first_elem[table_row, layer] = -1
        self.places[table_row, layer, :, 0] = -1

    def _assign(self, used: Sequence[AdapterRows]) -> bool:
        """Give each of `used` a table row: a free one, or the longest unused one that the step doesn't use.

        Return True if any got a new table row.
        """
        fresh: dict[AdapterRows, None] = {}
        for rows in used:
            table_row = self._table_rows.pop(rows, None)
            if table_row is None:
                fresh[rows] = None
            else:
                self._table_rows[rows] = table_row
        if not fresh:
            return False
        keep = set(used)
        idle = [rows for rows in self._table_rows if rows not in keep]
        room = len(self.offsets) - len(self._table_rows)
        if len(fresh) > room + len(idle):
            raise TablesFull(f"the step has {len(keep)} adapter parts, but the tables have {len(self.offsets)} rows")
        for rows in fresh:
            self._check(rows)
        for rows in fresh:
            table_row = len(self._table_rows) if room > 0 else self._table_rows.pop(idle.pop(0))
            room -= 1
            self._table_rows[rows] = table_row
            self._of_table_row[table_row, :2] = rows.rank, rows.slab_elems
            self._of_table_row[table_row, 2:].view(np.float32)[0] = rows.scale
        self._records.write([self._table_rows[rows] for rows in fresh], [self._entries(rows) for rows in fresh])
        return True

    def _entries(self, rows: AdapterRows) -> tuple[np.ndarray, ...]:
        """An adapter's rows of `first_elem`, `offsets`, `places` and `pages`."""
        offsets = np.full((2, self.modules), -1, np.int32)
        for own, of_modules in zip(offsets, (rows.a_offset, rows.b_offset), strict=True):
            own[: len(of_modules)] = of_modules[: self.modules]
        pages = np.array(rows.pages, dtype=np.int32)
        return np.array(rows.first_elem, dtype=np.int64), offsets, self._places(rows, pages), pages

    def _places(self, rows: AdapterRows, pages: np.ndarray) -> np.ndarray:
        """The adapter's records `[layers, blocks, 1 + pages]`; missing pages are filled with the last page."""
        begin = np.array(rows.first_elem, dtype=np.int64)[:, None]
        page, at = np.divmod(begin + self._blocks * (PLACE_ROWS * rows.slab_elems), self.page_elems)
        near = pages[np.clip(page[:, :, None] + self._within, 0, len(pages) - 1)]
        return np.concatenate([np.where(begin < 0, -1, at)[:, :, None], near], axis=2).astype(np.int32)

    def _check(self, rows: AdapterRows) -> None:
        if any(offset >= 0 for offset in rows.a_offset[self.modules :]):
            raise ValueError(f"an adapter changes a module beyond the {self.modules} that the tables hold")
        if rows.rank > self.max_rank:
            raise ValueError(f"rank {rows.rank} is above the tables' {self.max_rank}")
        if len(rows.pages) > self.pages.shape[1]:
            raise ValueError(f"an adapter has {len(rows.pages)} pages, but the tables hold {self.pages.shape[1]}")
        if rows.slab_elems > self._slab_elems:
            raise ValueError(f"an adapter has slabs of {rows.slab_elems} elements, not {self._slab_elems}")


def place_blocks(max_rank: int) -> int:
    """Number of records of an adapter's layer."""
    return -(-max_rank // PLACE_ROWS)


def place_pages(page_elems: int, slab_elems: int) -> int:
    """The most pages that PLACE_ROWS rank-rows touch, wherever the first begins; 0 if a record can't hold them."""
    pages = place_window(page_elems, PLACE_ROWS * slab_elems)
    in_reach = page_elems + PLACE_ROWS * slab_elems < 1 << 31  # kernels count elements from the first page in 32 bits
    return pages if pages <= _PLACE_PAGES and in_reach else 0


def place_window(page_elems: int, elems: int) -> int:
    """The most pages that so many elements in a row touch, wherever the first is."""
    return (elems - 2) // page_elems + 2
