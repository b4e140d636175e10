"""Segmented gather matrix-vector multiplication (Punica §4) over adapters that lie in pages.

    y[s:e] += scale · (x[s:e] @ Aᵀ) @ Bᵀ      for every segment [s, e) of tokens that share an adapter

A and B are read through the adapter's page table, any mix of ranks in one call, no padding. This is the CPU
implementation; `sgmv_ref` is the plain one that tests compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

#: Consecutive rank-rows: one strided view `[n, width]` in a page, or the pieces `[1, …]` of a row over several pages.
Block = list[torch.Tensor]


@dataclass(slots=True, eq=False, weakref_slot=True)
class AdapterRows:
    """Places of an adapter's rank-rows in the arena: those of all its modules and layers with one rank and scale.

    The adapter's elements run over its `pages`: element v is in `pages[v // page_elems]`, at `v % page_elems`.
    Rank-row i of a layer begins at `first_elem[layer] + i · slab_elems`, -1 where there is none; row i of module m's A
    is `a_offset[m]` elements further, row i of its Bᵀ `b_offset[m]`; -1 where the module is not targeted.
    """

    pages: Sequence[int]
    rank: int
    scale: float
    slab_elems: int
    a_offset: Sequence[int]
    b_offset: Sequence[int]
    first_elem: Sequence[int]
    _blocks: dict[tuple[int, int], tuple[list[Block], list[Block]]] = field(default_factory=dict, init=False)
    _places: int = field(default=-1, init=False)

    @property
    def places(self) -> int:
        """The modules that it changes in each layer, a bit for each: two that have none in common never meet."""
        if self._places < 0:
            modules = sum(1 << module for module, offset in enumerate(self.a_offset) if offset >= 0)
            layers = enumerate(self.first_elem)
            self._places = sum(modules << len(self.a_offset) * layer for layer, first in layers if first >= 0)
        return self._places

    def blocks(
        self, arena: torch.Tensor, layer: int, module: int, d_in: int, d_out: int
    ) -> tuple[list[Block], list[Block]]:
        """The layer's rows of the module's A and of its Bᵀ, in order of rank. No copy; made once.

        Empty where the layer or the module has no rows.
        """
        key = (layer, module)
        found = self._blocks.get(key)
        if found is None:
            first, a, b = self.first_elem[layer], self.a_offset[module], self.b_offset[module]
            if first < 0 or a < 0:
                found = [], []
            else:
                found = list(self._rows(arena, first + a, d_in)), list(self._rows(arena, first + b, d_out))
            self._blocks[key] = found
        return found

    def matrices(
        self, arena: torch.Tensor, layer: int, module: int, d_in: int, d_out: int
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """A `[rank, d_in]` and Bᵀ `[rank, d_out]`, copied; None where the layer or the module has no rows."""
        a, b = self.blocks(arena, layer, module, d_in, d_out)
        return (torch.cat([_join(rows) for rows in a]), torch.cat([_join(rows) for rows in b])) if a else (None, None)

    def _rows(self, arena: torch.Tensor, start: int, width: int) -> Iterator[Block]:
        page_elems = arena.shape[1]
        row = 0
        while row < self.rank:
            index, at = divmod(start + row * self.slab_elems, page_elems)
            if at + width > page_elems:
                yield list(self._pieces(arena, index, at, width))
                row += 1
                continue
            count = min(self.rank - row, (page_elems - width - at) // self.slab_elems + 1)
            page = arena[self.pages[index]]
            yield [page.as_strided((count, width), (self.slab_elems, 1), page.storage_offset() + at)]
            row += count

    def _pieces(self, arena: torch.Tensor, index: int, at: int, width: int) -> Iterator[torch.Tensor]:
        while width:
            piece = arena[self.pages[index]][None, at : at + width]
            yield piece
            width -= piece.shape[1]
            index, at = index + 1, 0


@dataclass(slots=True)
class Segments:
    """A step's runs of tokens that share an adapter: tokens `begin[i]:end[i]` use `rows[i]`.

    An adapter with rows of several ranks or scales has an entry for each; tokens may have several adapters, one of
    them with its scale negated, for instance. Tokens of the base model have none. What the entries of a token add to
    the same module is summed in the order in which they were added.

    level: 0, or above that of all earlier entries that share tokens, and a module of a layer, with this one. Entries of
    one level can be computed side by side, a level after those below it.
    ready: where the number of its layers that have arrived lies, an int32; 0 when all have. late: those that `forward`
    waited for in vain.
    """

    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    rows: list[AdapterRows] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    level: list[int] = field(default_factory=list)
    _end: int = 0  # of all entries
    _tokens: tuple[int, int] | None = None  # of the last entries, if nobody else has any of them
    _taken: list[int] = field(default_factory=list)  # by those, of each level

    def add(self, begin: int, end: int, rows: AdapterRows, ready: int = 0) -> None:
        self.level.append(self._level(begin, end, rows.places))
        self.begin.append(begin)
        self.end.append(end)
        self.rows.append(rows)
        self.ready.append(ready)

    def _level(self, begin: int, end: int, places: int) -> int:
        if begin == end:
            return 0
        if begin >= self._end:  # as most are: nobody has these tokens yet
            self._tokens, self._end, self._taken = (begin, end), end, [places]
            return 0
        if (begin, end) == self._tokens:
            level = next((level for level in reversed(range(len(self._taken))) if self._taken[level] & places), -1) + 1
            if level == len(self._taken):
                self._taken.append(0)
            self._taken[level] |= places
            return level
        self._tokens, self._end = None, max(self._end, end)
        earlier = zip(self.begin, self.end, self.rows, self.level, strict=True)
        return 1 + max((at for a, b, rows, at in earlier if a < end and begin < b and rows.places & places), default=-1)

    def __iter__(self) -> Iterator[tuple[int, int, AdapterRows]]:
        return zip(self.begin, self.end, self.rows, strict=True)


def sgmv(
    y: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    segments: Segments,
    layer: int,
    modules: Sequence[tuple[int, int, int]],
) -> None:
    """Add every segment's LoRA product to y, in place.

    y: `[tokens, out]`, the packed outputs of the projections that share x `[tokens, in]`.
    arena: `[num_pages, page_elems]`. modules: (module id, first column in y, width) per projection.
    """
    d_in = x.shape[1]
    for first, last, adapter in segments:
        rows = x[first:last]
        for module, column, width in modules:
            a_blocks, b_blocks = adapter.blocks(arena, layer, module, d_in, width)
            if not a_blocks:
                continue
            h = _join([rows @ _join(block).T for block in a_blocks])  # [tokens, rank]
            target = y[first:last, column : column + width]
            row = 0
            for block in b_blocks:
                b = _join(block)
                target.addmm_(h[:, row : row + len(b)], b, alpha=adapter.scale)
                row += len(b)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
