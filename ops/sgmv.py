"""Segmented gather matrix-vector multiplication (Punica §4) over adapters that lie in pages.

    y[s:e] += scale · (x[s:e] @ Aᵀ) @ Bᵀ      for every segment [s, e) of tokens that share an adapter

A and B are read through the adapter's page table, any mix of ranks in one call, no padding. This is the CPU
implementation; `sgmv_ref` is the plain one that tests compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

#: Rank-rows of A `[n, in]` and of Bᵀ `[n, out]` that lie in one page.
RowViews = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, eq=False, weakref_slot=True)
class AdapterRows:
    """Where rank-rows of an adapter lie in the arena: those of all its modules and layers with one rank and scale.

    Rank-row i of a layer is slab `first_slab[layer] + i`, -1 where there is none. Slab s is in page
    `pages[s // slabs_per_page]`, `slab_elems` elements apart; row i of module m's A starts `a_offset[m]` elements into
    it, row i of its Bᵀ `b_offset[m]`; -1 where the module is not targeted.
    """

    pages: Sequence[int]
    rank: int
    scale: float
    slab_elems: int
    slabs_per_page: int
    a_offset: Sequence[int]
    b_offset: Sequence[int]
    first_slab: Sequence[int]
    _views: dict[tuple[int, int], list[RowViews]] = field(default_factory=dict)

    def views(self, arena: torch.Tensor, layer: int, module: int, d_in: int, d_out: int) -> list[RowViews]:
        """Strided views of layer `layer`'s rows of `module`, one pair per page they lie in. No copy; made once.

        Empty where the layer or the module has no rows.
        """
        key = (layer, module)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = list(self._build_views(arena, layer, module, d_in, d_out))
        return found

    def _build_views(self, arena: torch.Tensor, layer: int, module: int, d_in: int, d_out: int) -> Iterator[RowViews]:
        if self.a_offset[module] < 0 or self.first_slab[layer] < 0:
            return
        slab = self.first_slab[layer]
        end = slab + self.rank
        while slab < end:
            page, place = divmod(slab, self.slabs_per_page)
            count = min(end - slab, self.slabs_per_page - place)
            rows = arena[self.pages[page]][place * self.slab_elems : (place + count) * self.slab_elems]
            rows = rows.view(count, self.slab_elems)
            a, b = self.a_offset[module], self.b_offset[module]
            yield rows[:, a : a + d_in], rows[:, b : b + d_out]
            slab += count


@dataclass(slots=True)
class Segments:
    """A step's runs of tokens that share an adapter: tokens `begin[i]:end[i]` use `rows[i]`.

    An adapter with rows of several ranks or scales has an entry for each; entries of the same tokens have no module of
    a layer in common. Tokens of the base model have none.
    """

    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    rows: list[AdapterRows] = field(default_factory=list)

    def add(self, begin: int, end: int, rows: AdapterRows) -> None:
        self.begin.append(begin)
        self.end.append(end)
        self.rows.append(rows)

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
            target = y[first:last, column : column + width]
            for a, b in adapter.views(arena, layer, module, d_in, width):
                target.addmm_(rows @ a.T, b, alpha=adapter.scale)
