"""Layout of an adapter's rank-rows in its pages: no padding to a rank, to a set of modules or to a number of layers.

Tests: tests/memory/files/test_adapter_format.py, tests/core/model/lora/test_lora_state_cuda.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .layout import ROW_ALIGNMENT_BYTES, SlabLayout
from .projections import Projections

_VECTOR_BYTES = 4  # of a float32


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """A share of an adapter: every one of `targets` (module names) in every one of `layers` has this rank and scale.

    Every one of `layers` has all `targets`. An ordinary adapter of a model with equal layers is one part; rank, alpha
    and layer patterns make several, and so do layers with other projections. Modules of the model, and those of
    mixtures of experts, are in parts of their own.
    """

    rank: int
    scale: float
    layers: tuple[int, ...]
    targets: tuple[str, ...]

    token_ids: tuple[int, ...] = ()
    """Of whole rows of embeddings or of the head, one for each rank-row: their tokens, in rising order."""

    file_rows: tuple[int, ...] = ()
    """Of whole rows: where each is in the file's tensor."""

    experts: tuple[int, ...] = ()
    """Of projections of experts, in rising order: those that have this rank and scale. Each has `rank` rank-rows, and
    an expert's are side by side.
    """

    @property
    def num_rows(self) -> int:
        """Rank-rows in a layer."""
        return self.rank * max(1, len(self.experts))

    @property
    def num_slabs(self) -> int:
        return self.num_rows * len(self.layers)


class VectorTarget(NamedTuple):
    """A module of a layer whose outputs an adapter scales and shifts, and its tensors for that."""

    layer: int
    module: str
    has_magnitude: bool = False
    """DoRA's magnitudes."""
    has_bias: bool = False
    """A bias in place of the base model's."""
    has_lora_bias: bool = False
    """A bias of B."""
    has_scale: bool = False
    """Factors of its outputs."""
    has_scale_of_next: bool = False
    """Factors of the inputs of the module whose inputs have these outputs as factors; see `Projections.scales`."""


def uniform_parts(
    projections: Projections, rank: int, scale: float = 1.0, targets: Collection[str] | None = None
) -> tuple[AdapterPart, ...]:
    """The parts of an adapter with one rank and scale on `targets`, by default on all projections of layers, in every
    layer that has them.
    """
    wanted = projections.names if targets is None else targets
    by_layers: dict[tuple[tuple[int, ...], bool, bool, int], list[str]] = {}
    for each in projections:
        if each.name in wanted:
            key = projections.layers_of(each.name), each.is_of_model, each.is_of_mixture, each.experts
            by_layers.setdefault(key, []).append(each.name)
    return tuple(
        AdapterPart(rank, scale, layers, tuple(names), experts=tuple(range(experts)))
        for (layers, *_, experts), names in sorted(by_layers.items())
    )


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Medium of a part. Rank-row i of layer l begins at element `first_elem[l] + i · slabs.slab_elems` of the adapter.

    first_elem is -1 for a layer that the part doesn't change. layer_elems: elements of its slabs in one layer.
    """

    slabs: SlabLayout
    first_elem: tuple[int, ...]
    layer_elems: int


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """Layout of an adapter's vectors, in float32 whatever its dtype: a scale and an offset for each output of a module.

    The offsets of a module begin `vector_elems` elements after its scales.
    """

    first_elem: tuple[tuple[int, ...], ...]
    """By layer and module id, the element of the adapter where the scales begin; -1 for a module without vectors."""

    layer_elems: tuple[tuple[int, int], ...]
    """The run of elements `begin … end` of each layer; empty for a layer without vectors."""

    @classmethod
    def build(
        cls, targets: Sequence[VectorTarget], projections: Projections, first: int, itemsize: int
    ) -> VectorLayout | None:
        """Lay vectors out layer by layer from element `first` on; None if there are none."""
        if not targets:
            return None
        firsts = [[-1] * len(projections) for _ in range(projections.num_layers)]
        runs, elem = [], first
        for layer, own in enumerate(firsts):
            begin = elem
            for target in targets:
                if target.layer == layer:
                    own[projections.id(target.module)] = elem
                    elem += 2 * vector_elems(projections[target.module].outputs, itemsize)
            runs.append((begin, elem))
        return cls(tuple(map(tuple, firsts)), tuple(runs))


def vector_elems(outputs: int, itemsize: int) -> int:
    """Elements of `itemsize` bytes that a vector takes in an adapter: whole 16 bytes."""
    return -(-outputs * _VECTOR_BYTES // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES // itemsize


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AdapterLayout:
    """Every part's layout, and how many pages the adapter takes in all.

    An adapter is one run of `num_elems` elements over its pages: element v is in its page `v // page_elems`, at
    `v % page_elems`. Slabs and even rows go on in the next page, so only the last page has room left over.
    """

    parts: tuple[PartLayout, ...]
    num_elems: int
    num_pages: int
    num_layers: int
    vectors: VectorLayout | None = None

    @classmethod
    def build(
        cls,
        parts: Sequence[AdapterPart],
        projections: Projections,
        page_elems: int,
        itemsize: int,
        *,
        vectors: Sequence[VectorTarget] = (),
    ) -> AdapterLayout:
        """Lay out parts one after another, each layer-major, and then vectors."""
        laid_out, num_layers = [], projections.num_layers
        elem = 0
        for part in parts:
            slabs = SlabLayout.build(projections, part.targets, itemsize)
            first_elem = [-1] * num_layers
            for layer in part.layers:
                first_elem[layer] = elem
                elem += part.num_rows * slabs.slab_elems
            laid_out.append(PartLayout(slabs, tuple(first_elem), part.num_rows * slabs.slab_elems))
        own = VectorLayout.build(vectors, projections, elem, itemsize)
        if own is not None:
            elem = own.layer_elems[-1][1]
        return cls(tuple(laid_out), elem, -(-elem // page_elems), num_layers, own)

    def layer_ranges(self, layer: int) -> list[tuple[int, int]]:
        """The runs of elements `begin … end` that hold a layer: one for each part that changes it, one of vectors."""
        return self.ranges(range(layer, layer + 1))

    def ranges(self, layers: range) -> list[tuple[int, int]]:
        """As `layer_ranges`, of several layers; a part is one run in them."""
        found = []
        for part in self.parts:
            firsts = [first for first in part.first_elem[layers.start : layers.stop] if first >= 0]
            if firsts:
                found.append((firsts[0], firsts[-1] + part.layer_elems))
        if self.vectors is not None:
            runs = self.vectors.layer_elems[layers.start : layers.stop]
            if runs and runs[0][0] < runs[-1][1]:
                found.append((runs[0][0], runs[-1][1]))
        return found
