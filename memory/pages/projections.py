"""The modules of a model that adapters may change: a table, by name and by id.

Most are projections of its layers. Layers may differ: a layer with a recurrent mixer has other projections than one
with full attention. The token embeddings and the output projection are modules of the model; adapters have their
rank-rows next to those of the first and of the last layer. Pure data, like `layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Role(StrEnum):
    """Products that mean something to others than the layer that writes them, by name. All others are named by layers
    alone: as the slots of their weights, see `core.model.compose.build`.
    """

    EMBEDDING = "embedding"
    """The model's token embeddings: its input is a one-hot row of the vocabulary."""

    HEAD = "head"
    """The model's output projection, which gives the logits."""

    EMBEDDING_ROWS = "embedding_rows"
    """Whole rows of the token embeddings, which take the place of the model's: rank-rows of A alone."""

    HEAD_ROWS = "head_rows"
    """Likewise, of the output projection."""

    PER_LAYER = "per_layer_projection"
    """Of the model: makes the per-layer embeddings of all layers."""

    ROUTER = "experts.router"
    """The router of a mixture of experts."""

    SHARED_GATE_UP = "experts.shared_gate_up"
    """Of the expert that every token goes to; likewise `SHARED_DOWN`."""

    SHARED_DOWN = "experts.shared_down"

    SHARED_GATE = "experts.shared_gate"
    """The factor of that expert's output."""

    EXPERT_GATE_UP = "experts.gate_up"
    """Of each expert that tokens are routed to; likewise `EXPERT_DOWN`."""

    EXPERT_DOWN = "experts.down"

    KV_UP = "kv_up"
    """Of latent attention: each head's key and value, from their latents. Its outputs are never computed."""


#: Those of the model.
MODEL_ROLES = (Role.EMBEDDING, Role.HEAD, Role.EMBEDDING_ROWS, Role.HEAD_ROWS, Role.PER_LAYER)

#: Those of a layer's mixture of experts.
MIXTURE_ROLES = (
    Role.ROUTER,
    Role.SHARED_GATE_UP,
    Role.SHARED_DOWN,
    Role.SHARED_GATE,
    Role.EXPERT_GATE_UP,
    Role.EXPERT_DOWN,
)


def expert_path(path: str, expert: int) -> str:
    """The path of one of the experts that a path stands for."""
    return path.replace(".experts.", f".experts.{expert}.")


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection of a layer, or of the model."""

    path: str
    """Where a layer has it, such as `self_attn.q_proj`; of the model, where Llama has it."""

    product: str
    """The product that it is of: its projections share an input, and their outputs are side by side."""

    inputs: int
    outputs: int

    units: int
    """Equal parts, such as heads, that TP ranks share: of its inputs where it is row-parallel, else of its outputs."""

    sections: tuple[int, ...] = ()
    """Widths of parts of its outputs, each of which has all units; empty: the outputs are one part."""

    experts: int = 0
    """Experts of a layer, each of which has a matrix of this shape; 0: it is no projection of experts."""

    expert: int | None = None
    """Of one expert: which."""

    section_units: tuple[int, ...] = ()
    """The units of each part, where they differ; empty: all have `units`."""

    form: str = ""
    """Tells those of one module apart, where layers have it in different shapes."""

    is_bypassed: bool = False
    """transformers multiplies by its weight itself, so that what PEFT puts around the module changes nothing."""

    why_no_bias: str = ""
    """What a bias of an adapter would do that PEFT's does not, so that it is refused; empty: it is served."""

    bias_factor: float = 1.0
    """What multiplies its outputs in transformers, and here its inputs: an adapter's bias is multiplied by it, too."""

    is_row_parallel: bool = False
    """TP ranks share its inputs and add up their outputs."""

    merges: bool = True
    """Adapters may be merged into it."""

    scales: str = field(default="", compare=False)
    """The path of the projection whose inputs each have an output of this one as a factor; empty: there is none. Layers
    may differ in it.
    """

    @property
    def module(self) -> str:
        """Its path without the module around it."""
        return self.path.partition(".")[2] or self.path

    @property
    def name(self) -> str:
        """Its module, and its form."""
        return f"{self.module}@{self.form}" if self.form else self.module

    def of_expert(self, expert: int) -> Projection:
        """That of one of its experts."""
        return replace(self, path=expert_path(self.path, expert), experts=0, expert=expert)

    @property
    def dims(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.inputs, self.outputs

    @property
    def is_replicated(self) -> bool:
        """True if every TP rank has all of it: of what chooses among experts or tokens, so that all choose the same, of
        what makes the latents or the one key that all heads have, and of what is small.
        """
        return self.units == 1 and not self.is_row_parallel and self.product != Role.HEAD

    @property
    def num_weights(self) -> int:
        """Weights of it, or of all experts'."""
        return self.inputs * self.outputs * max(1, self.experts)

    @property
    def is_of_model(self) -> bool:
        """True if the model has it once, not a layer."""
        return self.product in MODEL_ROLES

    @property
    def is_of_mixture(self) -> bool:
        """True if it is of a layer's mixture of experts."""
        return self.product in MIXTURE_ROLES

    @property
    def is_rows(self) -> bool:
        """True if adapters have whole rows of it, not LoRA on it."""
        return self.product in (Role.EMBEDDING_ROWS, Role.HEAD_ROWS)

    def share(self, rank: int, size: int) -> tuple[slice, tuple[slice, ...]]:
        """Inputs, and parts of the outputs, of one of `size` ranks."""
        if self.is_replicated:
            return slice(None), (slice(None),)
        if self.product == Role.HEAD:
            return slice(None), (slice(rank * self.outputs // size, (rank + 1) * self.outputs // size),)
        if self.is_row_parallel:
            return share_of(self.inputs, self.units, rank, size), (slice(None),)
        widths = self.sections or (self.outputs,)
        units = self.section_units or (self.units,) * len(widths)
        return slice(None), sections_of(tuple(zip(widths, units, strict=True)), rank, size)


class UnitRows(NamedTuple):
    """Rows of one projection in a matrix of several that has the rows of all of them by unit, such as by head."""

    units: int

    width: int
    """Rows of a unit in the matrix."""

    sections: tuple[tuple[int, int], ...]
    """Of each part of the projection's outputs: its first row in a unit, and how many it has there."""

    @property
    def total(self) -> int:
        """Rows of the projection."""
        return self.units * sum(count for _, count in self.sections)

    def rows(self) -> list[int]:
        """The matrix's row of each of the projection's."""
        return [
            unit * self.width + first + at
            for first, count in self.sections
            for unit in range(self.units)
            for at in range(count)
        ]


def unit_rows(projections: Sequence[Projection], units: int | None = None) -> tuple[UnitRows, ...]:
    """Where a matrix of projections by unit has each. units: their number; None: that of the projection with the
    fewest, such as heads of keys. Others have several of theirs in each.
    """
    units = units or min(each.units for each in projections)
    widths = [[each // units for each in it.sections or (it.outputs,)] for it in projections]
    begins = accumulate((width for own in widths for width in own), initial=0)
    total = sum(map(sum, widths))
    return tuple(UnitRows(units, total, tuple((next(begins), width) for width in own)) for own in widths)


def share_of(width: int, units: int, rank: int, size: int) -> slice:
    """The part of `width` that one of `size` ranks has; with more ranks than units, several have the same unit."""
    each, first = width // units, rank * units // size
    return slice(first * each, max(first + 1, (rank + 1) * units // size) * each)


def sections_of(sections: Sequence[tuple[int, int]], rank: int, size: int) -> tuple[slice, ...]:
    """As `share_of`, of parts that lie side by side. sections: the width of each, and its units."""
    shares, first = [], 0
    for width, units in sections:
        own = share_of(width, units, rank, size)
        shares.append(slice(first + own.start, first + own.stop))
        first += width
    return tuple(shares)


class GemmShape(NamedTuple):
    """The sizes of a GEMM of a layer: of the projections of a product, side by side."""

    inputs: int

    modules: tuple[tuple[int, int, int], ...]
    """(module id, first column, width) of each projection."""

    is_row_parallel: bool
    """TP ranks share its inputs and add up their outputs."""

    @property
    def outputs(self) -> int:
        return sum(width for _, _, width in self.modules)


@dataclass(frozen=True)
class Projections:
    """The table of a model. A module's index in it is its projections' id everywhere, whatever their form: a layer has
    one of them. It is in the order of layers' products, those of mixtures of experts after the model's own: tables of
    the others leave them out.

    Raises ValueError for projections of one name that are not equal.
    """

    layers: tuple[tuple[Projection, ...], ...]
    """The projections of each layer."""

    model: tuple[Projection, ...] = ()
    """Those of the model itself."""

    def __post_init__(self) -> None:
        for projection in dict.fromkeys(projection for layer in self.layers for projection in layer):
            if projection != self[projection.name]:
                raise ValueError(f"layers have {projection.name} in two shapes: {self[projection.name]}, {projection}")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Projections], tuple[object, object]]:
        """Without the cached hash: another process has another one for each string."""
        return Projections, (self.layers, self.model)

    def __len__(self) -> int:
        """Ids."""
        return len(self._of_ids)

    def __iter__(self) -> Iterator[Projection]:
        """By id; those of one module and several forms are apart."""
        return iter(self._all)

    def __contains__(self, name: object) -> bool:
        return name in self._ids

    def __getitem__(self, name: str) -> Projection:
        """By name; of one expert by such as `experts.7.up_proj`."""
        found = self._by_name.get(name)
        return self._of_experts[name][1] if found is None else found

    def experts_of(self, name: str) -> tuple[Projection, ...]:
        """Each expert's own projection, of one of all experts."""
        return self._each_expert[name]

    def name_of_all(self, name: str) -> str:
        """The projection of all experts that one of an expert belongs to; others' own name."""
        return self._of_experts[name][0] if name in self._of_experts else name

    def id(self, name: str) -> int:
        return self._ids[name]

    def of_role(self, role: Role) -> int | None:
        """The id of the only projection of a role of the model; None if the table has none."""
        return next((self._ids[each.name] for each in self.model if each.product == role), None)

    def name_of(self, module: int) -> str:
        """By id, of the first form."""
        return self._of_ids[module].name

    def dims_of(self, module: int) -> tuple[int, int]:
        """Inputs and outputs of a projection, by id, of the first form."""
        return self._of_ids[module].dims

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The layers that have a projection; of the model's, the layer beside which adapters have their rank-rows."""
        return self._layers_of[name]

    def names_in(self, layer: int) -> tuple[str, ...]:
        """The projections of a layer, by id."""
        return tuple(sorted((each.name for each in self.layers[layer]), key=self.id))

    def scales(self, name: str) -> str | None:
        """The projection whose inputs each have an output of this one as a factor, in every layer that has this one:
        of a gated part's `up_proj` its `down_proj`, unless something is added to the former. None for others.
        """
        return self._scaled.get(name)

    @cached_property
    def _scaled(self) -> dict[str, str]:
        every = [each for layer in self.layers for each in layer]
        without = {each.name for each in every if not each.scales}
        return {each.name: replace(each, path=each.scales).name for each in every if each.name not in without}

    def products(self, layer: int) -> tuple[str, ...]:
        """The products of a layer, in order."""
        return tuple(dict.fromkeys(each.product for each in self.layers[layer]))

    def merged(self, layer: int) -> tuple[str, ...]:
        """Those which adapters may be merged into."""
        own = (each.product for each in self.layers[layer] if each.merges and not each.is_of_mixture)
        return tuple(dict.fromkeys(own))

    def columns(self, layer: int, product: str) -> tuple[tuple[int, int, int], ...]:
        """(module id, first column, width) of a layer's projections of a product, whose outputs are side by side."""
        own = [(self.id(each.name), each.outputs) for each in self.layers[layer] if each.product == product]
        begins = accumulate((width for _, width in own), initial=0)
        return tuple((module, begin, width) for (module, width), begin in zip(own, begins, strict=False))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers' projections that every token is multiplied with, outside mixtures of experts, by id."""
        return tuple(each.name for each in self._all if not each.is_of_model and not each.is_of_mixture)

    @property
    def names_with_mixtures(self) -> tuple[str, ...]:
        """`names`, and those of mixtures of experts."""
        return tuple(each.name for each in self._all if not each.is_of_model)

    @cached_property
    def num_own(self) -> int:
        """Ids outside mixtures of experts, which are the first."""
        return len({each.module for each in self._all if not each.is_of_mixture})

    @cached_property
    def mixture(self) -> frozenset[str]:
        """Names of the projections of mixtures of experts."""
        return frozenset(each.name for each in self._all if each.is_of_mixture)

    @property
    def gemm_shapes(self) -> tuple[GemmShape, ...]:
        """The different sizes of GEMMs of all layers. ValueError if a product has no common input."""
        return self._gemm_shapes[0]

    @property
    def gemm_shape_of(self) -> tuple[Mapping[str, int], ...]:
        """Indices in `gemm_shapes`, by layer and product; without mixtures of experts, and without `KV_UP`, whose
        outputs are never computed.
        """
        return self._gemm_shapes[1]

    @cached_property
    def unmerged(self) -> frozenset[str]:
        """Names of projections that are never merged with adapters: of mixtures, and small ones."""
        return self.mixture.union(each.name for each in self._all if not each.merges)

    @cached_property
    def bypassed(self) -> frozenset[str]:
        """Names of the projections that adapters can't change: see `Projection.is_bypassed`."""
        return frozenset(each.name for each in self._all if each.is_bypassed)

    @cached_property
    def num_weights(self) -> int:
        """Weights of all projections in all layers, outside mixtures of experts."""
        every = (projection for layer in self.layers for projection in layer)
        return sum(each.inputs * each.outputs for each in every if not each.is_of_mixture)

    @property
    def summed(self) -> frozenset[int]:
        """Widths of what TP ranks add up, of layers."""
        return frozenset(each.outputs for layer in self.layers for each in layer if each.is_row_parallel)

    def rank_elems(self, targets: Sequence[str] | None = None) -> int:
        """Elements of one rank of an adapter on `targets`, by default on all of the layers', wherever they are."""
        wanted = ((self[name], len(self.layers_of(name))) for name in targets or self.names)
        return sum(sum(each.dims) * max(1, each.experts) * layers for each, layers in wanted)

    @cached_property
    def _all(self) -> tuple[Projection, ...]:
        first: dict[str, Projection] = {}
        for projection in (projection for layer in self.layers for projection in layer):
            first.setdefault(projection.name, projection)
        places = {module: place for place, module in enumerate(self._in_order)}
        own = sorted(first.values(), key=lambda each: places[each.module])
        mixture = [each for each in own if each.is_of_mixture]
        return (*(each for each in own if not each.is_of_mixture), *self.model, *mixture)

    @cached_property
    def _ids(self) -> dict[str, int]:
        ids = {each.module: index for index, each in enumerate(self._of_ids)}
        return {each.name: ids[each.module] for each in self._all}

    @cached_property
    def _by_name(self) -> dict[str, Projection]:
        return {each.name: each for each in self._all}

    @cached_property
    def _of_ids(self) -> tuple[Projection, ...]:
        """The first form of each module, by id."""
        return tuple({each.module: each for each in reversed(self._all)}.values())[::-1]

    @cached_property
    def _in_order(self) -> list[str]:
        """The modules of layers: products in the order in which layers have them, and modules likewise within each."""
        layers = [*dict.fromkeys(self.layers)]
        modules = {
            own: _in_order([each.module for each in layer if each.product == own] for layer in layers)
            for own in _in_order(list(dict.fromkeys(each.product for each in layer)) for layer in layers)
        }
        return [*dict.fromkeys(module for own in modules.values() for module in own)]

    @cached_property
    def _of_experts(self) -> dict[str, tuple[str, Projection]]:
        """Each expert's projections, and the name of those of all experts, by name."""
        return {its.name: (name, its) for name, own in self._each_expert.items() for its in own}

    @cached_property
    def _each_expert(self) -> dict[str, tuple[Projection, ...]]:
        return {each.name: tuple(map(each.of_expert, range(each.experts))) for each in self._all if each.experts}

    @cached_property
    def _hash(self) -> int:
        return hash((self.layers, self.model))

    @cached_property
    def _layers_of(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {name: [] for name in self._ids}
        for index, layer in enumerate(self.layers):
            for projection in layer:
                found[projection.name].append(index)
        for projection in self.model:
            is_last = projection.product in (Role.HEAD, Role.HEAD_ROWS)
            found[projection.name].append(self.num_layers - 1 if is_last else 0)
        return {name: tuple(layers) for name, layers in found.items()}

    @cached_property
    def _gemm_shapes(self) -> tuple[tuple[GemmShape, ...], tuple[Mapping[str, int], ...]]:
        """The different sizes of GEMMs, and those of each layer."""
        found: dict[GemmShape, int] = {}
        of_layer: list[Mapping[str, int]] = []
        for layer in range(self.num_layers):
            products = (each for each in self.products(layer) if each not in (*MIXTURE_ROLES, Role.KV_UP))
            of_layer.append({each: found.setdefault(self._gemm_shape(layer, each), len(found)) for each in products})
        return tuple(found), tuple(of_layer)

    def _gemm_shape(self, layer: int, product: str) -> GemmShape:
        own = [projection for projection in self.layers[layer] if projection.product == product]
        if len({(projection.inputs, projection.is_row_parallel) for projection in own}) > 1:
            raise ValueError(f"the projections of {product} have no common input: {own}")
        return GemmShape(own[0].inputs, self.columns(layer, product), own[0].is_row_parallel)


def _in_order(layers: Iterable[Sequence[str]]) -> list[str]:
    """What layers have, in their order: what only later ones have stands before the next that earlier ones have."""
    order: list[str] = []
    for own in layers:
        for at, each in enumerate(own):
            if each not in order:
                known = (order.index(later) for later in own[at + 1 :] if later in order)
                order.insert(next(known, len(order)), each)
    return order
