"""How an adapter's rank-rows lie in its pages: no padding to a rank, to a set of modules or to a number of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import ModuleDims, SlabLayout


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """A share of an adapter: every one of `targets` (module names) in every one of `layers` has this rank and scale.

    An ordinary adapter is one part; rank, alpha and layer patterns make several.
    """

    rank: int
    scale: float
    layers: tuple[int, ...]
    targets: tuple[str, ...]

    @property
    def num_slabs(self) -> int:
        return self.rank * len(self.layers)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Where a part lies. Rank-row i of layer l is slab `first_slab[l] + i`; -1 for a layer that it doesn't change.

    Slab s is in page `first_page + s // slabs.slabs_per_page` of the adapter's. A part begins in the page that the one
    before it ends in, at the first multiple of its own slab size, so slabs are counted from that page's beginning.
    """

    slabs: SlabLayout
    first_page: int
    num_pages: int
    first_slab: tuple[int, ...]

    def pages_of(self, pages: Sequence[int]) -> Sequence[int]:
        """The part's pages among the adapter's."""
        return pages[self.first_page : self.first_page + self.num_pages]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AdapterLayout:
    """Every part's place, and how many pages the adapter takes in all."""

    parts: tuple[PartLayout, ...]
    num_pages: int

    @classmethod
    def build(
        cls, parts: Sequence[AdapterPart], dims: ModuleDims, num_layers: int, page_elems: int, itemsize: int
    ) -> AdapterLayout:
        """Lay out parts one after another. ValueError when a page can't hold one slab."""
        placed = []
        page, used = 0, page_elems  # the last page so far, and its elements that are taken
        for part in parts:
            slabs = SlabLayout.build(dims, part.targets, page_elems, itemsize)
            skipped = -(-used // slabs.slab_elems)
            if skipped >= slabs.slabs_per_page:
                skipped = 0
                page += 1 if placed else 0
            last = skipped + part.num_slabs - 1
            first_slab = [-1] * num_layers
            for index, layer in enumerate(part.layers):
                first_slab[layer] = skipped + index * part.rank
            num_pages = last // slabs.slabs_per_page + 1
            placed.append(PartLayout(slabs, page, num_pages, tuple(first_slab)))
            page += num_pages - 1
            used = (last % slabs.slabs_per_page + 1) * slabs.slab_elems
        return cls(tuple(placed), page + 1)
