"""A step's segments and adapters in static buffers, where the kernels of `sgmv_triton` read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from .sgmv import AdapterRows, Segments

NUM_MODULES = 7

#: Columns of `SgmvTables.meta`: rank, slab_elems, then the modules' a_offset and b_offset.
META_RANK, META_SLAB, META_A, META_B = 0, 1, 2, 2 + NUM_MODULES
META_WIDTH = 2 + 2 * NUM_MODULES

#: Copies host values (second) into a device tensor (first); the values may change once it returns.
Copy = Callable[[torch.Tensor, torch.Tensor], object]


class TablesFull(ValueError):
    """The step has more adapters, tiles or passes than the tables hold; nothing was written. Fewer rows may fit."""


class SgmvTables:
    """Buffers that never move: a captured launch reads what the last `plan` wrote.

    An adapter's rows of one rank and scale have a slot. Its entries are written when it gets the slot and stay while
    it is used; a step writes the table of tiles where it differs from the last, and the entries of all adapters that
    are new in one copy.

    Entries that change the same module of the same tokens are in passes of their own, one launch after the other, so
    that their products are summed in the order of the entries. Most steps have one pass.

    tiles:      int32 `[max_passes, max_tiles, 3]`, tokens `begin … end` use `slot`; -1: nothing to do
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
        make_copy: Callable[[int], Copy] = lambda num_bytes: torch.Tensor.copy_,
        max_passes: int = 2,
    ) -> None:
        """scratch: elements of h for the largest launch, see `scratch_elems`.

        max_passes: most entries that a token may have on one module.
        make_copy: gives what copies up to so many bytes from the host to the device.
        """
        self.max_rank = max_rank
        self.max_tiles = max_tiles
        room = -(-max_tiles // 4) * 4  # every pass's table begins on 16 bytes, as Triton assumes once it has seen one
        self.tiles = torch.full((max_passes, room, 3), -1, dtype=torch.int32, device=device)
        self.tiles_of_pass = list(self.tiles)
        self.passes = 0  # of the last step planned
        self.meta = torch.full((slots, META_WIDTH), -1, dtype=torch.int32, device=device)
        self.scale = torch.zeros(slots, dtype=torch.float32, device=device)
        self.first_elem = torch.full((slots, layers), -1, dtype=torch.int64, device=device)
        self.pages = torch.zeros((slots, max_pages), dtype=torch.int32, device=device)
        self.h = torch.empty(scratch, dtype=torch.float32, device=device)
        self._records = _Records(slots, layers, max_pages, device, make_copy)
        self._copies = [make_copy(tiles.numel() * tiles.itemsize) for tiles in self.tiles_of_pass]
        self._slots: dict[AdapterRows, int] = {}  # the least recently used first
        self._planned: tuple[Segments | None, tuple[int, int], int] = None, (0, 0), 0  # last, its key, its tiles
        self._tiles: list[list[tuple[int, int, int]]] = [[] for _ in self._copies]  # as they are in `tiles`

    @staticmethod
    def scratch_elems(splits: int, tokens: int, modules: int, max_rank: int) -> int:
        return splits * tokens * modules * max_rank

    def plan(self, segments: Segments, tile_tokens: int) -> int:
        """Write a step's tables: segments cut into tiles of at most `tile_tokens` tokens. Returns how many tiles the
        pass with the most has; `passes` is how many passes there are.

        Tiles beyond them say that there is nothing to do, so a launch over any number of tiles from here on is right,
        and so is one more pass. The segments of the last step, which most steps have, are written already; adding to
        them makes them others.
        """
        key = len(segments.rows), tile_tokens
        if segments is self._planned[0] and key == self._planned[1]:
            return self._planned[2]
        self._planned = None, key, 0  # until all is written
        passes = 1 + max(segments.level, default=-1)
        if passes > len(self.tiles):
            raise TablesFull(f"a token has {passes} entries on one module, the tables have room for {len(self.tiles)}")
        counts = [0] * passes
        for (begin, end, _), level in zip(segments, segments.level, strict=True):
            counts[level] += -(-(end - begin) // tile_tokens)
        count = max(counts, default=0)
        if count > self.max_tiles:
            raise TablesFull(f"the step has {count} tiles, the tables have room for {self.max_tiles}")
        self._assign([rows for begin, end, rows in segments if end > begin])
        planned: list[list[tuple[int, int, int]]] = [[] for _ in self._tiles]
        for (begin, end, rows), level in zip(segments, segments.level, strict=True):
            for first in range(begin, end, tile_tokens):
                planned[level].append((first, min(first + tile_tokens, end), self._slots[rows]))
        for index, tiles in enumerate(planned):
            if tiles != self._tiles[index]:
                idle = len(self._tiles[index]) - len(tiles)
                table = torch.from_numpy(np.array(tiles + [(0, 0, -1)] * idle, dtype=np.int32))
                self._copies[index](self.tiles_of_pass[index][: len(table)], table)
        self._tiles, self.passes = planned, passes
        self._planned = segments, key, count
        return count

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
            raise TablesFull(f"the step has {len(keep)} adapter parts, the tables have {len(self.scale)} slots")
        for rows in fresh:
            self._check(rows)
        for rows in fresh:
            slot = len(self._slots) if room > 0 else self._slots.pop(idle.pop(0))
            room -= 1
            self._slots[rows] = slot
        self._records.write(self, [(self._slots[rows], rows) for rows in fresh])

    def _check(self, rows: AdapterRows) -> None:
        if rows.rank > self.max_rank:
            raise ValueError(f"rank {rows.rank} is above the tables' {self.max_rank}")
        if len(rows.pages) > self.pages.shape[1]:
            raise ValueError(f"an adapter has {len(rows.pages)} pages, the tables have room for {self.pages.shape[1]}")


class _Records:
    """New slots' entries: side by side on the host, one copy to the device, and there put where they belong."""

    def __init__(
        self, slots: int, layers: int, max_pages: int, device: torch.device | str, make_copy: Callable[[int], Copy]
    ) -> None:
        widths = (2, 2 * layers, META_WIDTH, 1, max_pages)  # in 32 bits; the first two are 64-bit values
        ends = np.cumsum(widths).tolist()
        self._parts = [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
        self._device = torch.empty((slots, ends[-1] + ends[-1] % 2), dtype=torch.int32, device=device)
        self._copy = make_copy(self._device.numel() * self._device.itemsize)

    def write(self, tables: SgmvTables, entries: Sequence[tuple[int, AdapterRows]]) -> None:
        slot, first, meta, scale, pages = self._parts
        host = np.zeros((len(entries), self._device.shape[1]), dtype=np.int32)
        for record, (index, rows) in zip(host, entries, strict=True):
            record[slot].view(np.int64)[:] = index
            record[first].view(np.int64)[:] = rows.first_elem
            record[meta] = (rows.rank, rows.slab_elems, *rows.a_offset, *rows.b_offset)
            record[scale].view(np.float32)[:] = rows.scale
            record[pages][: len(rows.pages)] = rows.pages
        device = self._device[: len(entries)]
        self._copy(device, torch.from_numpy(host))
        slots = device[:, slot].view(torch.int64)[:, 0]
        tables.first_elem.index_copy_(0, slots, device[:, first].view(torch.int64))
        tables.meta.index_copy_(0, slots, device[:, meta])
        tables.scale.index_copy_(0, slots, device[:, scale].view(torch.float32)[:, 0])
        tables.pages.index_copy_(0, slots, device[:, pages])
