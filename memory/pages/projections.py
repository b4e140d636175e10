"""The modules of a model that adapters may change: a table, by name and by id.

Most are projections of its layers. Layers may differ: a layer with a recurrent mixer has other projections than one
with full attention. The token embeddings and the output projection are modules of the model; adapters have their
rank-rows next to those of the first and of the last layer. Pure data, like `layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple


class Group(IntEnum):
    """The products of a model. The projections of a group share an input, and their outputs are side by side."""

    MIXER_IN = 0
    """Query, key and value; or the inputs of a recurrent mixer."""

    MIXER_OUT = 1
    GATE_UP = 2
    DOWN = 3

    EMBEDDING = 4
    """The model's token embeddings: its input is a one-hot row of the vocabulary."""

    HEAD = 5
    """The model's output projection, which gives the logits."""

    EMBEDDING_ROWS = 6
    """Whole rows of the token embeddings, which take the place of the model's: rank-rows of A alone."""

    HEAD_ROWS = 7
    """Likewise, of the output projection."""

    ROUTER = 8
    """The router of a mixture of experts."""

    SHARED_GATE_UP = 9
    """Of the expert that every token goes to; likewise `SHARED_DOWN`."""

    SHARED_DOWN = 10

    SHARED_GATE = 11
    """The factor of that expert's output."""

    EXPERT_GATE_UP = 12
    """Of each expert that tokens are routed to; likewise `EXPERT_DOWN`."""

    EXPERT_DOWN = 13

    QUERY_UP = 14
    """Of latent attention: the queries, from their latents, and those of an indexer."""

    KV_UP = 15
    """Of latent attention: each head's key and value, from their latents."""

    INPUT_GATE = 16
    """Gates a further input of a layer; likewise `INPUT_PROJECTION` of what it gives."""

    INPUT_PROJECTION = 17

    INPUTS = 18
    """Of the model: makes the further inputs of all layers."""

    BESIDE_IN = 19
    """The inputs of a recurrent mixer beside attention; likewise `BESIDE_OUT` of its output."""

    BESIDE_OUT = 20

    LOW_RANK_DOWN = 21
    """The first of two small matrices beside a mixer, or of those around experts; likewise `LOW_RANK_UP`."""

    LOW_RANK_UP = 22

    DECAY_UP = 23
    """Of a recurrent mixer: decays, from their latents."""

    OUTPUT_GATE_UP = 24
    """Likewise, gates of its output."""

    SCAN_IN = 25
    """Of a mixer of two parts: latents of its steps, B and C, from what the first part gives."""

    INDEX_UP = 26
    """The queries of an indexer, where latent attention's have another input."""

    MIXER_GATES_DOWN = 27
    """The first of two small matrices that make gates of a mixer's normalised input; likewise `MIXER_GATES_UP`."""

    MIXER_GATES_UP = 28

    MLP_GATES_DOWN = 29
    """Likewise, of the feed-forward part's; and `MLP_GATES_UP`."""

    MLP_GATES_UP = 30

    PLACE_HEADS_DOWN = 31
    """A layer's own small matrices beside shared ones: the first of queries', keys' and values' pairs."""

    PLACE_QUERY_UP = 32
    """The second one of queries; likewise `PLACE_KEY_UP` and `PLACE_VALUE_UP`."""

    PLACE_KEY_UP = 33
    PLACE_VALUE_UP = 34

    PLACE_MLP_DOWN = 35
    """Likewise, the pair of gate and up."""

    PLACE_MLP_UP = 36

    PLACE_OUT = 37
    """Of a layer whose block others share: from the block's output to what its mixer reads."""

    ROUTER_DOWN = 38
    """Of a small network before a mixture's router: from the layer's input; then `ROUTER_FIRST` and `ROUTER_SECOND`."""

    ROUTER_FIRST = 39
    ROUTER_SECOND = 40

    MIXER_STREAMS_DOWN = 41
    """Of several residual streams, the first of two small matrices that make gates of what a mixer takes, and what
    makes the numbers by which it gives; likewise `MLP_STREAMS_DOWN`, and `JOIN_DOWN` behind all layers.
    """

    MIXER_STREAMS_UP = 42
    """The second one."""

    MLP_STREAMS_DOWN = 43
    MLP_STREAMS_UP = 44
    JOIN_DOWN = 45
    JOIN_UP = 46

    LOOKUP_IN = 47
    """Keys and a value, of the rows of a table that a token has."""


#: Those of a layer.
LAYER_GROUPS = (Group.MIXER_IN, Group.MIXER_OUT, Group.GATE_UP, Group.DOWN)

#: Further ones of a layer with latent attention.
LATENT_GROUPS = (Group.QUERY_UP, Group.KV_UP, Group.INDEX_UP)

#: Further ones of a layer with a recurrent mixer whose gates or steps have latents.
GATE_GROUPS = (Group.DECAY_UP, Group.OUTPUT_GATE_UP, Group.SCAN_IN)

#: Those of a layer's mixture of experts.
MIXTURE_GROUPS = (
    Group.ROUTER,
    Group.SHARED_GATE_UP,
    Group.SHARED_DOWN,
    Group.SHARED_GATE,
    Group.EXPERT_GATE_UP,
    Group.EXPERT_DOWN,
)

#: Those of a layer's further input; all TP ranks have them.
INPUT_GROUPS = (Group.INPUT_GATE, Group.INPUT_PROJECTION)

#: Those of a recurrent mixer beside attention.
BESIDE_GROUPS = (Group.BESIDE_IN, Group.BESIDE_OUT)

#: Those of two small matrices beside a mixer (LAuReL), or around experts (Muse Spark); all TP ranks have them.
LOW_RANK_GROUPS = (Group.LOW_RANK_DOWN, Group.LOW_RANK_UP)

#: Those of two small matrices for the gates of a norm's output, by the norm; all TP ranks have them.
NORM_GATES = {
    "attention_norm": (Group.MIXER_GATES_DOWN, Group.MIXER_GATES_UP),
    "mlp_norm": (Group.MLP_GATES_DOWN, Group.MLP_GATES_UP),
}

#: Those of a small network before a mixture's router; all TP ranks have them.
ROUTER_GROUPS = (Group.ROUTER_DOWN, Group.ROUTER_FIRST, Group.ROUTER_SECOND)

#: Those of the gates of several streams, by what takes of them; all TP ranks have them.
STREAM_GATES = {
    "attn": (Group.MIXER_STREAMS_DOWN, Group.MIXER_STREAMS_UP),
    "mlp": (Group.MLP_STREAMS_DOWN, Group.MLP_STREAMS_UP),
    "join": (Group.JOIN_DOWN, Group.JOIN_UP),
}

#: Those of all small matrices beside a layer's parts, which adapters are never merged into.
SMALL_GROUPS = (
    *INPUT_GROUPS,
    *LOW_RANK_GROUPS,
    *NORM_GATES["attention_norm"],
    *NORM_GATES["mlp_norm"],
    *ROUTER_GROUPS,
    *(group for groups in STREAM_GATES.values() for group in groups),
    Group.LOOKUP_IN,
)

#: Pairs of small matrices that a layer has of its own beside a block that layers share.
PLACE_PAIRS = (
    Group.PLACE_HEADS_DOWN,
    Group.PLACE_QUERY_UP,
    Group.PLACE_KEY_UP,
    Group.PLACE_VALUE_UP,
    Group.PLACE_MLP_DOWN,
    Group.PLACE_MLP_UP,
)

#: All that it has of its own.
PLACE_GROUPS = (*PLACE_PAIRS, Group.PLACE_OUT)

#: Those that some layers have besides `LAYER_GROUPS`, outside mixtures of experts.
FURTHER_GROUPS = (*LATENT_GROUPS, *GATE_GROUPS, *BESIDE_GROUPS, *SMALL_GROUPS, *PLACE_GROUPS)

_MODEL_GROUPS = (Group.EMBEDDING, Group.HEAD, Group.EMBEDDING_ROWS, Group.HEAD_ROWS, Group.INPUTS)

_OF_PLACES = (Group.PLACE_HEADS_DOWN, Group.PLACE_MLP_DOWN, Group.PLACE_OUT)

_REPLICATED = frozenset(
    {Group.EMBEDDING, Group.ROUTER, Group.SHARED_GATE, *SMALL_GROUPS, Group.INPUTS, Group.INDEX_UP, *_OF_PLACES}
)

_ROW_PARALLEL = frozenset(
    {Group.MIXER_OUT, Group.DOWN, Group.SHARED_DOWN, Group.EXPERT_DOWN, Group.BESIDE_OUT, Group.SCAN_IN}
)

#: Those of a mixer. A layer that is a feed-forward part alone has neither.
_MIXER = frozenset({Group.MIXER_IN, Group.MIXER_OUT})

#: Those of a gated feed-forward part. A layer with experts has neither.
_FEED_FORWARD = frozenset({Group.GATE_UP, Group.DOWN})


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection of a layer, or of the model."""

    path: str
    """Where a layer has it, such as `self_attn.q_proj`; of the model, where Llama has it."""

    group: Group
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
        return replace(self, path=self.path.replace(".experts.", f".experts.{expert}."), experts=0, expert=expert)

    @property
    def dims(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.inputs, self.outputs

    @property
    def is_row_parallel(self) -> bool:
        """True if TP ranks share its inputs and add up their outputs."""
        return self.group in _ROW_PARALLEL

    @property
    def is_replicated(self) -> bool:
        """True if every TP rank has all of it: of what chooses among experts or tokens, so that all choose the same, of
        what makes the latents or the one key that all heads have, and of what is small.
        """
        is_common = self.group in (Group.MIXER_IN, Group.QUERY_UP) and self.units == 1
        return is_common or self.group in _REPLICATED or self.is_rows

    @property
    def num_weights(self) -> int:
        """Weights of it, or of all experts'."""
        return self.inputs * self.outputs * max(1, self.experts)

    @property
    def is_of_model(self) -> bool:
        """True if the model has it once, not a layer."""
        return self.group in _MODEL_GROUPS

    @property
    def is_of_mixture(self) -> bool:
        """True if it is of a layer's mixture of experts."""
        return self.group in MIXTURE_GROUPS

    @property
    def is_rows(self) -> bool:
        """True if adapters have whole rows of it, not LoRA on it."""
        return self.group in (Group.EMBEDDING_ROWS, Group.HEAD_ROWS)

    def share(self, rank: int, size: int) -> tuple[slice, tuple[slice, ...]]:
        """Inputs, and parts of the outputs, of one of `size` ranks."""
        if self.is_replicated:
            return slice(None), (slice(None),)
        if self.group is Group.HEAD:
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
    """The sizes of a GEMM of a layer: of the projections of a group, side by side."""

    group: Group
    inputs: int

    modules: tuple[tuple[int, int, int], ...]
    """(module id, first column, width) of each projection."""

    @property
    def outputs(self) -> int:
        return sum(width for _, _, width in self.modules)


@dataclass(frozen=True)
class Projections:
    """The table of a model. A module's index in it is its projections' id everywhere, whatever their form: a layer has
    one of them. It is in the order of groups, those of mixtures of experts after the model's own: tables of the others
    leave them out.

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

    def of_group(self, group: Group) -> int | None:
        """The id of the only projection of a group of the model; None if the table has none."""
        return next((self._ids[each.name] for each in self.model if each.group is group), None)

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
        found: dict[str, str] = {}
        without: set[str] = set()
        for layer in self.layers:
            inputs, outputs = (
                [each.name for each in layer if each.group is own] for own in (Group.GATE_UP, Group.DOWN)
            )
            is_alone = not any(each.group is Group.PLACE_MLP_UP for each in layer)
            if len(inputs) == 2 and len(outputs) == 1 and is_alone:
                found[inputs[1]] = outputs[0]
            else:
                without.update(inputs)
        return {name: reader for name, reader in found.items() if name not in without}

    def columns(self, layer: int, group: Group) -> tuple[tuple[int, int, int], ...]:
        """(module id, first column, width) of a layer's projections of a group, whose outputs are side by side."""
        own = sorted((self.id(each.name), each.outputs) for each in self.layers[layer] if each.group is group)
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
        """The different sizes of GEMMs of all layers. ValueError if a group has no common input."""
        return self._gemm_shapes[0]

    @property
    def gemm_shape_of(self) -> tuple[tuple[int, ...], ...]:
        """Indices in `gemm_shapes`, by layer and group of `LAYER_GROUPS`."""
        return tuple(tuple(found[group] for group in LAYER_GROUPS) for found in self._gemm_shapes[1])

    @property
    def gemm_shape_in(self) -> tuple[Mapping[int, int], ...]:
        """Indices in `gemm_shapes`, by layer and group: of every layer's groups, and of `FURTHER_GROUPS` but for
        `KV_UP`, whose outputs are never computed.
        """
        return self._gemm_shapes[1]

    @cached_property
    def unmerged(self) -> frozenset[str]:
        """Names of projections that are never merged with adapters: of mixtures, and those of `SMALL_GROUPS`."""
        return self.mixture.union(each.name for each in self._all if each.group in SMALL_GROUPS)

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
        own = sorted(first.values(), key=lambda projection: projection.group)
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
        """The first form of each module, by id: those of a group in an order that they have in every layer."""
        found: dict[str, Projection] = {}
        for each in self._all:
            found.setdefault(each.module, each)
        places = {module: place for place, module in enumerate(self._in_order)}
        in_layers = sorted((each for each in found.values() if each.module in places), key=self._key(places))
        own = iter(in_layers)
        return tuple(next(own) if each.module in places else each for each in found.values())

    @staticmethod
    def _key(places: Mapping[str, int]) -> Callable[[Projection], tuple[bool, Group, int]]:
        """Orders projections of layers: those of mixtures last, then by group, then by place."""
        return lambda each: (each.is_of_mixture, each.group, places[each.module])

    @cached_property
    def _in_order(self) -> list[str]:
        """The modules of layers: one that only later layers have stands before the next one that earlier ones have."""
        order: list[str] = []
        for layer, group in product(dict.fromkeys(self.layers), Group):
            own = [each.module for each in layer if each.group is group]
            for at, module in enumerate(own):
                if module not in order:
                    known = (order.index(later) for later in own[at + 1 :] if later in order)
                    order.insert(next(known, len(order)), module)
        return order

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
            is_first = projection.group in (Group.EMBEDDING, Group.EMBEDDING_ROWS, Group.INPUTS)
            found[projection.name].append(0 if is_first else self.num_layers - 1)
        return {name: tuple(layers) for name, layers in found.items()}

    @cached_property
    def _gemm_shapes(self) -> tuple[tuple[GemmShape, ...], tuple[Mapping[int, int], ...]]:
        """The different sizes of GEMMs, and those of each layer."""
        found: dict[GemmShape, int] = {}
        of_layer: list[Mapping[int, int]] = []
        for layer in self.layers:
            own = {each.group for each in layer}
            groups = (*LAYER_GROUPS, *(group for group in FURTHER_GROUPS if group in own and group is not Group.KV_UP))
            of_layer.append({group: found.setdefault(self._gemm_shape(layer, group), len(found)) for group in groups})
        return tuple(found), tuple(of_layer)

    def _gemm_shape(self, layer: Sequence[Projection], group: Group) -> GemmShape:
        own = [projection for projection in layer if projection.group is group]
        part = _FEED_FORWARD if group in _FEED_FORWARD else _MIXER
        part = frozenset() if group is Group.MIXER_OUT else part  # outputs may be experts', too
        if not own and group in LAYER_GROUPS and part.isdisjoint(projection.group for projection in layer):
            return GemmShape(group, 0, ())  # the layer has experts, or one part alone
        if not own:
            raise ValueError(f"a layer has no projection of the group {group.name}: {layer}")
        if len({projection.inputs for projection in own}) > 1:
            raise ValueError(f"the projections of {group.name} have no common input: {own}")
        own.sort(key=lambda projection: self._ids[projection.name])
        begins = accumulate((each.outputs for each in own), initial=0)
        modules = ((self._ids[each.name], begin, each.outputs) for each, begin in zip(own, begins, strict=False))
        return GemmShape(group, own[0].inputs, tuple(modules))
