"""A step's adapters on mixtures of experts in static buffers, where a GPU makes the tiles of SGMV from them.

Which expert a token goes to is known on the device alone. So the tables have the places of every expert's rank-rows,
and `mixture_tables_triton` writes the tiles of each product, in the form of `SgmvTables`, before SGMV's launches.

Tests: tests/core/model/moe/test_mixture_launches_interpreted.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..lora.sgmv import AdapterRows
from ..lora.sgmv_tables import SgmvTables, TablesFull, TableSizes, place_window
from ..table_records import Copy, TableRecords

#: The most parts of an adapter: a place says in its low bits which part it is of.
MAX_PARTS = 16

#: Columns of `MixtureTables.parts`: rank, slab_elems and scale, as tiles have them, then offsets as `SgmvTables` has.
PART_OFFSETS = 8

#: The adapters of a run of tokens: its parts on mixtures.
Parts = tuple[AdapterRows, ...]


class ModuleGroup(NamedTuple):
    """Projections that share an input."""

    modules: tuple[tuple[int, int, int], ...]
    """(module id, first column, width) of each."""
    inputs: int
    experts: int = 0
    """Experts that each have them; 0: every token has the same."""


class MixtureSizes(NamedTuple):
    """Room in `MixtureTables`."""

    adapters: int
    layers: int
    max_pages: int
    """The most pages of an adapter."""
    max_rank: int
    page_elems: int
    slab_elems: int
    """The most of a part."""
    tokens: int
    """The most of a step."""
    tiles: int
    """The most of a launch."""


@dataclass(frozen=True, slots=True)
class TileWriter:
    """Compile-time constants of the launch that writes the tiles of a product."""

    first: int
    """The first place of its rank-rows in a layer."""
    places: int
    """Places of a layer."""
    experts: int
    """0: every token has the same rank-rows."""
    per_token: int
    """Experts of a token."""
    adapters: int
    """Adapters that runs of tokens are numbered with; 0: a tile is one pair of a token and an expert."""
    page: int
    """Elements of a page."""
    window: int
    """Pages that a tile's rank-rows may touch."""
    blocks: int
    """Records of a tile."""
    record: int
    """Pages of a record; 0: there are none."""
    modules: int
    """Of mixtures."""

    @property
    def each(self) -> int:
        """Places of a projection of the group."""
        return max(1, self.experts)

    @property
    def window_block(self) -> int:
        """`window`, or the next power of two."""
        return 1 << (self.window - 1).bit_length()

    @property
    def record_block(self) -> int:
        """`record`, or the next power of two."""
        return 1 << max(0, self.record - 1).bit_length()

    @property
    def offsets(self) -> int:
        """Offsets of a part: of every module's A, then of B."""
        return 2 * self.modules

    @property
    def offsets_block(self) -> int:
        """`offsets`, or the next power of two."""
        return 1 << (self.offsets - 1).bit_length()


class MixtureTables:
    """Buffers that never move: captured launches read the data of the last `plan`.

    A place is that of an adapter's rank-rows of one expert and of a group's projections in a layer. A group has as many
    places for an expert as projections, because they may be in different parts.

    adapter_of: int32 `[tokens]`: the row of a token's adapter in the other tables, -1 if it has none
    places:     int64 `[adapters, layers, places]`: the element of the adapter where the rank-rows begin, times
                MAX_PARTS, and the part; -1 if there are none
    parts:      int32 `[adapters, MAX_PARTS, PART_OFFSETS + 2 · modules]`
    pages:      int32 `[adapters, max_pages]`, the adapter's pages in the arena
    tiles:      tiles of one product, which the device writes before each
    """

    def __init__(
        self,
        sizes: MixtureSizes,
        groups: Mapping[str, ModuleGroup],
        device: torch.device | str = "cpu",
        make_copy: Callable[[int], Copy] = lambda num_bytes: torch.Tensor.copy_,
    ) -> None:
        """groups: by name. make_copy: see `SgmvTables`."""
        self.max_rank, self.page_elems, self._slab_elems = sizes.max_rank, sizes.page_elems, sizes.slab_elems
        self._first_module = min(module for group in groups.values() for module, _, _ in group.modules)
        self.groups: dict[str, ModuleGroup] = {}
        """With modules counted from the first of mixtures, as the tables count them."""
        self.first_place: dict[str, int] = {}
        num_places = 0
        for name, group in groups.items():
            self.first_place[name] = num_places
            own = tuple((module - self._first_module, column, width) for module, column, width in group.modules)
            self.groups[name] = group._replace(modules=own)
            num_places += len(own) * max(1, group.experts)
        modules = 1 + max(module for group in self.groups.values() for module, _, _ in group.modules)
        self._num_places, self._layers = num_places, sizes.layers
        self.adapter_of = torch.full((sizes.tokens,), -1, dtype=torch.int32, device=device)
        self.places = torch.full((sizes.adapters, sizes.layers, num_places), -1, dtype=torch.int64, device=device)
        width = PART_OFFSETS + 2 * modules
        self.parts = torch.zeros((sizes.adapters, MAX_PARTS, width), dtype=torch.int32, device=device)
        self.pages = torch.zeros((sizes.adapters, sizes.max_pages), dtype=torch.int32, device=device)
        self.window = place_window(sizes.page_elems, sizes.max_rank * sizes.slab_elems)
        self.tiles = SgmvTables(
            TableSizes(
                table_rows=sizes.tiles,
                layers=1,
                max_pages=self.window,
                max_rank=sizes.max_rank,
                max_tiles=sizes.tiles,
                scratch=0,
                page_elems=sizes.page_elems,
                slab_elems=sizes.slab_elems,
                modules=modules,
                max_terms=1,
                usual_rows=1,
                usual_tiles=1,
            ),
            device,
        )
        self._records = TableRecords((self.places, self.parts), 1, make_copy, last=self.pages)
        self._copy = make_copy(sizes.tokens * self.adapter_of.itemsize)
        self._rows: dict[Parts, int] = {}  # least recently used first
        self._planned = np.full(sizes.tokens, -1, dtype=np.int32)  # what `adapter_of` has

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        tables = self.adapter_of, self.places, self.parts, self.pages
        own = sum(table.numel() * table.itemsize for table in tables)
        return own + self.tiles.num_bytes + self._records.num_bytes

    def plan(self, runs: Sequence[tuple[int, int, Parts]]) -> None:
        """Write a step's tables. runs: tokens `begin … end` use these parts of an adapter; others use none.

        Raises TablesFull, and ValueError for an adapter that they can't hold.
        """
        used = dict.fromkeys(parts for begin, end, parts in runs if end > begin)
        self._assign(used)
        wanted = np.full_like(self._planned, -1)
        for begin, end, parts in runs:
            if (wanted[begin:end] >= 0).any():
                raise ValueError("a token has two adapters on a mixture of experts")
            wanted[begin:end] = self._rows[parts] if end > begin else -1
        if changed := np.flatnonzero(wanted != self._planned).tolist():
            end = changed[-1] + 1
            self._copy(self.adapter_of[:end], torch.from_numpy(wanted[:end]))
            self._planned = wanted

    def writer(self, group: str, per_token: int = 1, *, by_runs: bool = False) -> TileWriter:
        """The constants of the launch that writes a group's tiles. by_runs: see `TileWriter.adapters`."""
        return TileWriter(
            first=self.first_place[group],
            places=self._num_places,
            experts=self.groups[group].experts,
            per_token=per_token,
            adapters=self.num_runs if by_runs else 0,
            page=self.page_elems,
            window=self.window,
            blocks=self.tiles.places.shape[2],
            record=self.tiles.place_pages,
            modules=self.tiles.modules,
        )

    @property
    def num_runs(self) -> int:
        """Adapters that runs of tokens are numbered with: none is 0, then the tables' rows."""
        return len(self.parts) + 1

    def _assign(self, used: Mapping[Parts, None]) -> None:
        """Give each of `used` a row: a free one, or the longest unused one that the step doesn't use."""
        fresh = []
        for parts in used:
            row = self._rows.pop(parts, None)
            if row is None:
                fresh.append(parts)
            else:
                self._rows[parts] = row
        idle = [parts for parts in self._rows if parts not in used]
        room = len(self.parts) - len(self._rows)
        if len(fresh) > room + len(idle):
            raise TablesFull(f"the step has {len(used)} adapters on experts, but tables have {len(self.parts)} rows")
        for parts in fresh:
            entries = self._entries(parts)
            row = len(self._rows) if room > 0 else self._rows.pop(idle.pop(0))
            room -= 1
            self._rows[parts] = row
            self._records.write([row], [entries])

    def _entries(self, parts: Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """An adapter's rows of `places`, `parts` and `pages`."""
        places = np.full((self._layers, self._num_places), -1, dtype=np.int64)
        own = np.full(self.parts.shape[1:], -1, dtype=np.int32)
        if len(parts) > MAX_PARTS:
            raise ValueError(f"an adapter has {len(parts)} parts on mixtures of experts, tables hold {MAX_PARTS}")
        for index, rows in enumerate(parts):
            self._check(rows)
            own[index, :2] = rows.rank, rows.slab_elems
            own[index, 2:3].view(np.float32)[0] = rows.scale
            for begin, of_modules in ((0, rows.a_offset), (self.tiles.modules, rows.b_offset)):
                values = of_modules[self._first_module : self._first_module + self.tiles.modules]
                own[index, PART_OFFSETS + begin :][: len(values)] = values
            for name, group in self.groups.items():
                if any(own[index, PART_OFFSETS + module] >= 0 for module, _, _ in group.modules):
                    self._place(places, name, rows, index)
        return places, own, np.array(parts[0].pages, dtype=np.int32)

    def _place(self, places: np.ndarray, name: str, rows: AdapterRows, index: int) -> None:
        """Write the places of a part's rank-rows of a group: of each expert, the first that no other part has."""
        group, experts = self.groups[name], np.array(rows.experts or (0,))
        each = np.arange(len(experts)) * (rows.rank * rows.slab_elems)
        for layer, first in enumerate(rows.first_elem):
            left, values = experts, (first + each) * MAX_PARTS + index
            for slot in range(len(group.modules) if first >= 0 else 0):
                columns = self.first_place[name] + slot * max(1, group.experts) + left
                free = places[layer, columns] < 0
                places[layer, columns[free]] = values[free]
                left, values = left[~free], values[~free]

    def _check(self, rows: AdapterRows) -> None:
        if rows.rank > self.max_rank:
            raise ValueError(f"rank {rows.rank} is above the tables' {self.max_rank}")
        if len(rows.pages) > self.pages.shape[1]:
            raise ValueError(f"an adapter has {len(rows.pages)} pages, but the tables hold {self.pages.shape[1]}")
        if rows.slab_elems > self._slab_elems:
            raise ValueError(f"an adapter has slabs of {rows.slab_elems} elements, not {self._slab_elems}")
