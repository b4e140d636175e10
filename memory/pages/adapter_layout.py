"""Layout of an adapter's rank-rows in its pages: no padding to a rank, to a set of modules or to a number of layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .layout import SlabLayout
from .projections import Projections


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """A share of an adapter: every one of `targets` (module names) in every one of `layers` has this rank and scale.

    Every one of `layers` has all `targets`. An ordinary adapter of a model with equal layers is one part; rank, alpha
    and layer patterns make several, and so do layers with other projections. Modules of the model are in parts of
    their own.
    """

    rank: int
    scale: float
    layers: tuple[int, ...]
    targets: tuple[str, ...]

    token_ids: tuple[int, ...] = ()
    """Of whole rows of embeddings or of the head, one for each rank-row: their tokens, in rising order."""

    file_rows: tuple[int, ...] = ()
    """Of whole rows: where each is in the file's tensor."""

    @property
    def num_slabs(self) -> int:
        return self.rank * len(self.layers)


def uniform_parts(
    projections: Projections, rank: int, scale: float = 1.0, targets: Collection[str] | None = None
) -> tuple[AdapterPart, ...]:
    """The parts of an adapter with one rank and scale on `targets`, by default on all projections of layers, in every
    layer that has them.
    """
    wanted = projections.names if targets is None else targets
    by_layers: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for each in projections:
        if each.name in wanted:
            by_layers.setdefault((projections.layers_of(each.name), each.is_of_model), []).append(each.name)
    return tuple(AdapterPart(rank, scale, layers, tuple(names)) for (layers, _), names in sorted(by_layers.items()))


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Place of a part. Rank-row i of layer l begins at element `first_elem[l] + i · slabs.slab_elems` of the adapter.

    first_elem is -1 for a layer that the part doesn't change. layer_elems: elements of its slabs in one layer.
    """

    slabs: SlabLayout
    first_elem: tuple[int, ...]
    layer_elems: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AdapterLayout:
    """Every part's place, and how many pages the adapter takes in all.

    An adapter is one run of `num_elems` elements over its pages: element v is in its page `v // page_elems`, at
    `v % page_elems`. Slabs and even rows go on in the next page, so only the last page has room left over.
    """

    parts: tuple[PartLayout, ...]
    num_elems: int
    num_pages: int
    num_layers: int

    @classmethod
    def build(
        cls, parts: Sequence[AdapterPart], projections: Projections, page_elems: int, itemsize: int
    ) -> AdapterLayout:
        """Lay out parts one after another, each layer-major."""
        placed, num_layers = [], projections.num_layers
        elem = 0
        for part in parts:
            slabs = SlabLayout.build(projections, part.targets, itemsize)
            first_elem = [-1] * num_layers
            for layer in part.layers:
                first_elem[layer] = elem
                elem += part.rank * slabs.slab_elems
            placed.append(PartLayout(slabs, tuple(first_elem), part.rank * slabs.slab_elems))
        return cls(tuple(placed), elem, -(-elem // page_elems), num_layers)

    def layer_ranges(self, layer: int) -> list[tuple[int, int]]:
        """The runs of elements `begin … end` that hold a layer, one for each part that changes it."""
        return self.ranges(range(layer, layer + 1))

    def ranges(self, layers: range) -> list[tuple[int, int]]:
        """As `layer_ranges`, of several layers; what one part has in them is one run."""
        found = []
        for part in self.parts:
            firsts = [first for first in part.first_elem[layers.start : layers.stop] if first >= 0]
            if firsts:
                found.append((firsts[0], firsts[-1] + part.layer_elems))
        return found
