"""A step's segments and adapters in static buffers, where the kernels of `sgmv_triton` read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sgmv import AdapterRows, Segments

NUM_MODULES = 7

#: Columns of `SgmvTables.meta`: rank, slab_elems, then the modules' a_offset and b_offset.
META_RANK, META_SLAB, META_A, META_B = 0, 1, 2, 2 + NUM_MODULES
META_WIDTH = 2 + 2 * NUM_MODULES


class SgmvTables:
    """Buffers that never move: a captured launch reads what the last `plan` wrote.

    An adapter's rows of one rank and scale have a slot. Its entries are written when it gets the slot and stay while
    it is used; a step writes the table of tiles, and entries of adapters that are new.

    tiles:      int32 `[max_tiles, 3]`, tokens `begin … end` use `slot`; -1: nothing to do
    meta:       int32 `[slots, META_WIDTH]`, a_offset and b_offset are -1 where a module is not targeted
    scale:      float32 `[slots]`
    first_elem: int64 `[slots, layers]`, where the layer's slabs begin in the adapter, -1 where it has none; an adapter
                of a large model has more elements than 32 bits count
    pages:      int32 `[slots, max_pages]`, the adapter's pages in the arena
    h:          float32, flat: the partial sums `[splits, tokens, modules, max_rank]` between shrink and expand
    """

    def __init__(
        self,
        *,
        slots: int,
        layers: int,
        max_pages: int,
        max_rank: int,
        max_tiles: int,
        scratch: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """scratch: elements of h for the largest launch, see `scratch_elems`."""
        self.max_rank = max_rank
        self.max_tiles = max_tiles
        self.tiles = torch.full((max_tiles, 3), -1, dtype=torch.int32, device=device)
        self.meta = torch.full((slots, META_WIDTH), -1, dtype=torch.int32, device=device)
        self.scale = torch.zeros(slots, dtype=torch.float32, device=device)
        self.first_elem = torch.full((slots, layers), -1, dtype=torch.int64, device=device)
        self.pages = torch.zeros((slots, max_pages), dtype=torch.int32, device=device)
        self.h = torch.empty(scratch, dtype=torch.float32, device=device)
        self._slots: dict[AdapterRows, int] = {}  # the least recently used first
        self._written = 0

    @staticmethod
    def scratch_elems(splits: int, tokens: int, modules: int, max_rank: int) -> int:
        return splits * tokens * modules * max_rank

    def plan(self, segments: Segments, tile_tokens: int) -> int:
        """Write a step's tables: segments cut into tiles of at most `tile_tokens` tokens. Returns how many tiles.

        Tiles beyond them say that there is nothing to do, so a launch over any number of tiles from here on is right.
        Host memory is pageable: it may change as soon as a copy is issued.
        """
        self._assign([rows for begin, end, rows in segments if end > begin])
        tiles = [
            (first, min(first + tile_tokens, end), self._slots[rows])
            for begin, end, rows in segments
            for first in range(begin, end, tile_tokens)
        ]
        if len(tiles) > self.max_tiles:
            raise ValueError(f"the step has {len(tiles)} tiles, the tables have room for {self.max_tiles}")
        idle = max(self._written - len(tiles), 0)
        if tiles or idle:
            table = torch.tensor(tiles + [(0, 0, -1)] * idle, dtype=torch.int32)
            self.tiles[: len(table)].copy_(table, non_blocking=True)
        self._written = len(tiles)
        return len(tiles)

    def _assign(self, used: Sequence[AdapterRows]) -> None:
        """Give each of `used` a slot; those that the step doesn't use give theirs up, the longest unused first."""
        fresh: dict[AdapterRows, None] = {}
        for rows in used:
            slot = self._slots.pop(rows, None)
            if slot is None:
                fresh[rows] = None
            else:
                self._slots[rows] = slot
        if not fresh:
            return
        keep = set(used)
        idle = [rows for rows in self._slots if rows not in keep]
        room = len(self.scale) - len(self._slots)
        if len(fresh) > room + len(idle):
            raise ValueError(f"the step has {len(keep)} adapter parts, the tables have {len(self.scale)} slots")
        for rows in fresh:
            self._check(rows)
        for rows in fresh:
            slot = len(self._slots) if room > 0 else self._slots.pop(idle.pop(0))
            room -= 1
            self._write(slot, rows)
            self._slots[rows] = slot

    def _check(self, rows: AdapterRows) -> None:
        if rows.rank > self.max_rank:
            raise ValueError(f"rank {rows.rank} is above the tables' {self.max_rank}")
        if len(rows.pages) > self.pages.shape[1]:
            raise ValueError(f"an adapter has {len(rows.pages)} pages, the tables have room for {self.pages.shape[1]}")

    def _write(self, slot: int, rows: AdapterRows) -> None:
        meta = torch.tensor([rows.rank, rows.slab_elems, *rows.a_offset, *rows.b_offset], dtype=torch.int32)
        self.meta[slot].copy_(meta, non_blocking=True)
        self.first_elem[slot].copy_(torch.tensor(rows.first_elem, dtype=torch.int64), non_blocking=True)
        self.pages[slot, : len(rows.pages)].copy_(torch.tensor(rows.pages, dtype=torch.int32), non_blocking=True)
        self.scale[slot] = rows.scale
