"""The slots of a layer's weights: the tensors of each, how ranks share them, and how they are kept.

Ops name the slots that they read (see `program.ops`). Whatever reads, moves, quantises, counts or shares weights loops
over slots.

Tests: tests/core/model/weights/test_slots.py, tests/core/model/weights/test_weight_loader.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from typing import NamedTuple

from ....memory.pages.projections import (
    NORM_GATES,
    PLACE_GROUPS,
    ROUTER_GROUPS,
    SMALL_GROUPS,
    STREAM_GATES,
    Group,
    Projection,
    sections_of,
    share_of,
)
from ..specs.attention import AttentionSpec, HeadNorm, LatentSpec
from ..specs.config import ModelConfig
from ..specs.feed_forward import Experts, GatedSpec, UngatedActivation
from ..specs.gated_streams import GatedStreamsSpec
from ..specs.hyper_connections import HyperConnectionSpec
from ..specs.indexer import IndexerSpec
from ..specs.layers import LayerSpec, StreamsSpec
from ..specs.ngrams import TABLE
from ..specs.norms import Norms, NormSpec
from ..specs.recurrent import RecurrentSpec
from ..specs.shared_block import SharedBlock
from ..specs.tensor_names import CORRECTION, IMAGE_CORRECTION, IMAGE_ROUTER, SINK_ROUTER

#: A part of a tensor: slices of its first dimensions.
Part = tuple[slice, ...]

#: The slot of each group's matrix. That of its bias, `…_bias`, is a slot, too, if the model has one or an adapter that
#: is merged.
MATRICES = {
    Group.MIXER_IN: "qkv",
    Group.MIXER_OUT: "o",
    Group.GATE_UP: "gate_up",
    Group.DOWN: "down",
    Group.QUERY_UP: "q_up",
    Group.KV_UP: "kv_up",
    Group.INPUT_GATE: "input_gate",
    Group.INPUT_PROJECTION: "input_projection",
    Group.BESIDE_IN: "beside_in",
    Group.BESIDE_OUT: "beside_out",
    Group.LOW_RANK_DOWN: "low_rank_down",
    Group.LOW_RANK_UP: "low_rank_up",
    Group.DECAY_UP: "decay_up",
    Group.OUTPUT_GATE_UP: "output_gate_up",
    Group.SCAN_IN: "scan_in",
    Group.INDEX_UP: "index_up",
    Group.MIXER_GATES_DOWN: "mixer_gates_down",
    Group.MIXER_GATES_UP: "mixer_gates_up",
    Group.MLP_GATES_DOWN: "mlp_gates_down",
    Group.MLP_GATES_UP: "mlp_gates_up",
    Group.PLACE_HEADS_DOWN: "place_heads_down",
    Group.PLACE_QUERY_UP: "place_query_up",
    Group.PLACE_KEY_UP: "place_key_up",
    Group.PLACE_VALUE_UP: "place_value_up",
    Group.PLACE_MLP_DOWN: "place_mlp_down",
    Group.PLACE_MLP_UP: "place_mlp_up",
    Group.PLACE_OUT: "place_out",
    Group.ROUTER_DOWN: "router_down",
    Group.ROUTER_FIRST: "router_first",
    Group.ROUTER_SECOND: "router_second",
    **{group: f"streams_{group.name.lower()}" for groups in STREAM_GATES.values() for group in groups},
    Group.LOOKUP_IN: "lookup_in",
}

#: Those which adapters may be merged into.
MERGED_MATRICES = {int(group): name for group, name in MATRICES.items() if group not in SMALL_GROUPS}

#: Slots of parts whose weights are one object: slots `recurrent.…` are of a recurrent mixer, `experts.…` of a mixture,
#: `image_experts.…` of that of images' positions, `query_experts.…` of experts of queries, `sink_experts.…` of sinks.
RECURRENT, EXPERTS, IMAGE_EXPERTS, QUERY_EXPERTS = "recurrent", "experts", "image_experts", "query_experts"
SINK_EXPERTS = "sink_experts"

#: Likewise `lookup.…` of a table of n-grams, beside the table itself.
LOOKUP, LOOKUP_TABLE = "lookup", "lookup_table"

#: Norms that a layer may have around its parts, by where they stand.
_NORMS = {
    Norms.BEFORE: ("attention_norm", "mlp_norm"),
    Norms.AFTER: ("attention_out_norm", "mlp_out_norm"),
    Norms.AROUND: ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"),
    Norms.AFTER_MLP: ("attention_norm", "mlp_norm", "mlp_out_norm"),
    Norms.PARALLEL: ("attention_norm",),
    Norms.BEHIND: ("attention_out_norm", "mlp_out_norm"),
    Norms.BEHIND_MIXER: ("attention_out_norm",),
    Norms.PARALLEL_APART: ("attention_norm", "mlp_norm"),
    Norms.NONE: (),
}

#: Hyper-connections of a layer's two parts, and the slots of their matrix, base and scale: see `HyperConnectionSpec`.
CONNECTIONS = {f"{part}_hc": (f"{part}_hyper", f"{part}_hyper_base", f"{part}_hyper_scale") for part in ("attn", "ffn")}

#: Those of what joins the streams behind all layers.
JOINED = ("hyper_head", "hyper_head_base", "hyper_head_scale")

#: Learned factors and summands of what a part adds, and of the residual stream, by transformers' names.
RESIDUAL_SCALES = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")

#: Parameters of xIELU, each one number.
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


class Keep(Enum):
    """How a slot's tensors are kept."""

    MATRIX = auto()
    """A matrix: left as it was read, cast, narrow or packed, as the weights' plan says."""

    EXPERT = auto()
    """A matrix of an expert, likewise."""

    DENSE = auto()
    """A matrix that may be stored quantised, in the model's dtype: it is never multiplied as one."""

    NORM = auto()
    """A norm's weight: see `NormSpec`."""

    PLAIN = auto()
    """In the model's dtype."""

    FLOAT32 = auto()

    TABLE = auto()
    """In the host's memory, as the checkpoint's files map it: see `RowTable`."""

    UNUSED = auto()
    """A checkpoint has it, and no op reads it."""


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """A tensor of a layer, and the share of it that a TP rank has."""

    path: str
    """Where the layer has it, with the end of its name; norms of layers are named as their slots."""

    shape: tuple[int, ...]

    rows: tuple[tuple[int, int], ...] = ()
    """Widths of parts of its first dimension, and for each the number of equal units that ranks share. Empty: every
    rank has all of it.
    """

    columns: int = 0
    """The number of equal units of its second dimension that ranks share, likewise."""

    made: tuple[float, ...] = ()
    """No checkpoint has it: the numbers in each part of its first dimension, or in each of its rows."""

    def share(self, rank: int, size: int) -> tuple[Part, ...]:
        """The share of one of `size` ranks: parts, one after the other in its first dimension."""
        if size == 1 or not (self.rows or self.columns):
            return ((),)
        rows = sections_of(self.rows, rank, size) if self.rows else (slice(None),)
        columns = (share_of(self.shape[1], self.columns, rank, size),) if self.columns else ()
        return tuple((each, *columns) for each in rows)

    def numbers(self, rank: int, size: int) -> list[float]:
        """A rank's share of the numbers that no checkpoint has."""
        widths = [width for width, _ in self.rows] or [self.shape[0]]
        parts = [[each] * width for each, width in zip(self.made, widths, strict=False)]
        every = [*self.made] if len(self.made) == self.shape[0] else [number for part in parts for number in part]
        rows = sections_of(self.rows, rank, size) if self.rows else (slice(None),)
        return [number for own in rows for number in every[own]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight of a layer: tensors one below the other."""

    name: str
    """Its key in a layer's weights; with a dot, the part that it belongs to and its name there."""

    tensors: tuple[SlotTensor, ...]
    keep: Keep

    group: Group | None = None
    """Of a matrix: its group of projections."""

    first_rank: bool = False
    """Only the first rank has it: a bias of what ranks add up."""

    factor: float | None = None
    """Of a norm that is stored as float32: multiplies its weight. None: a norm like others."""

    count: int = 0
    """It is a list of weights for so many experts, whose tensors follow one another; 0: it is no list."""

    shared: int | None = None
    """The layer whose weight it is, that layer itself included; None: it is this layer's alone."""

    @property
    def items(self) -> Iterator[tuple[SlotTensor, ...]]:
        """The tensors of each weight of the slot."""
        length = len(self.tensors) // max(1, self.count)
        return (self.tensors[first : first + length] for first in range(0, len(self.tensors), length))


class StreamSlots(NamedTuple):
    """Slots of the matrices that make all streams but the first, and of those that these go through at last."""

    made: tuple[str, ...]
    joined: tuple[str, ...]


def stream_slots(streams: StreamsSpec | HyperConnectionSpec | GatedStreamsSpec | None) -> StreamSlots | None:
    """The slots of a model's own matrices of several streams; None: no matrix makes its streams."""
    if not isinstance(streams, StreamsSpec):
        return None
    others = range(1, streams.count)
    return StreamSlots(tuple(f"stream_in_{at}" for at in others), tuple(f"stream_out_{at}" for at in others))


def norms_of(layer: LayerSpec) -> tuple[str, ...]:
    """The norms that a layer has around its parts."""
    absent = ("attention_",) * (layer.mixer is None) + ("mlp_",) * (layer.feed_forward is None)
    return tuple(norm for norm in _NORMS[layer.norms] if not norm.startswith(absent))


def slots(spec: LayerSpec, config: ModelConfig) -> tuple[Slot, ...]:
    """A layer's slots. spec, config: of all ranks together."""
    return _slots(spec, config.norm, config.hidden_size)


@cache
def _slots(spec: LayerSpec, norm: NormSpec, hidden: int) -> tuple[Slot, ...]:
    own = _Layer(spec, norm, hidden)
    if (block := spec.block) is None:
        return tuple(own.slots())
    shared = [replace(slot, shared=block.first) for slot in own.of_block()]
    return (*shared, *own.beside_block(block))


class _Layer:
    """Yields the slots of one layer, in the order in which they are read."""

    def __init__(self, spec: LayerSpec, norm: NormSpec, hidden: int) -> None:
        self._spec, self._norm, self._hidden = spec, norm, hidden
        self._norms, self._biased = norms_of(spec), spec.biased
        self._groups: dict[Group, list[Projection]] = {}
        for each in spec.projections(hidden):
            self._groups.setdefault(each.group, []).append(each)

    def slots(self) -> Iterator[Slot]:
        spec = self._spec
        yield from self._around("attention_norm")
        yield from self._matrices(Group.MIXER_IN)
        if spec.attention is not None:
            yield from _of_heads(spec.attention)
            if (index := spec.attention.indexer) is not None:
                yield from _of_indexer(index, self._hidden)
            if (blocks := spec.attention.block_indexer) is not None:
                for name in ("q_norm", "k_norm"):
                    tensor = SlotTensor(f"self_attn.indexer.{name}.weight", (blocks.key_dim,))
                    yield Slot(f"index_{name}", (tensor,), Keep.NORM)
        yield from self._matrices(Group.QUERY_UP, Group.KV_UP, Group.INDEX_UP)
        if spec.attention is not None:
            yield from _of_attention(spec.attention)
            if spec.attention.query_experts is not None:
                yield from self._of_queries(spec.attention, spec.attention.query_experts.count)
        yield from self._matrices(Group.SCAN_IN, Group.DECAY_UP, Group.OUTPUT_GATE_UP)
        yield from self._further()
        yield from self._beside()
        if spec.recurrent is not None:
            yield from _of_recurrent(spec.recurrent)
        yield from self._matrices(Group.MIXER_OUT)
        yield from self._around("attention_out_norm")
        yield from self._feed_forward()

    def of_block(self) -> Iterator[Slot]:
        """Those of a block, which other layers have, too."""
        widths = {"block_norm": 2 * self._hidden, "mlp_norm": self._hidden}
        for name, width in widths.items():
            yield Slot(name, (SlotTensor(f"{name}.weight", (width,)),), Keep.NORM)
        yield from self._matrices(Group.MIXER_IN, Group.MIXER_OUT, Group.GATE_UP, Group.DOWN)

    def beside_block(self, block: SharedBlock) -> Iterator[Slot]:
        """A layer's own ones, besides those of its block."""
        yield from self._matrices(*PLACE_GROUPS)
        yield self._vector("second_norm", "second_norm.weight", Keep.NORM)
        yield from self._matrices(Group.BESIDE_IN)
        yield from _of_recurrent(block.mixer, block.mixer_path)
        yield from self._matrices(Group.BESIDE_OUT)

    def _feed_forward(self) -> Iterator[Slot]:
        spec = self._spec
        yield from self._around("mlp_norm")
        yield from self._matrices(Group.GATE_UP)
        if spec.dense is not None and spec.dense.activation is UngatedActivation.XIELU:
            yield Slot("xielu", tuple(SlotTensor(f"mlp.act_fn.{each}", (1,)) for each in _XIELU), Keep.FLOAT32)
        if isinstance(spec.dense, GatedSpec) and spec.dense.inner_norm:
            tensor = SlotTensor("mlp.ffn_sub_norm.weight", (spec.dense.size,))
            yield Slot("mlp_inner_norm", (tensor,), Keep.NORM)
        if isinstance(spec.dense, GatedSpec) and spec.dense.scaled:
            yield Slot("mlp_scale", (SlotTensor("mlp.global_scale", (1,)),), Keep.PLAIN)
        yield from self._matrices(Group.DOWN)
        yield from self._around("mlp_out_norm")
        if spec.beside is not None and not spec.is_late:
            for name in ("dense_out_norm", "experts_norm", "experts_out_norm"):
                yield self._vector(name, f"{name}.weight", Keep.NORM)
            yield self._vector("router_norm", "router.scale", Keep.NORM, self._hidden**-0.5)
        if spec.experts is not None:
            yield from self._mixture(spec.experts)
        yield from self._of_additions(spec)

    def _of_additions(self, spec: LayerSpec) -> Iterator[Slot]:
        """Learned factors where parts are added."""
        if spec.residual_temperature is not None:
            for name, part in (("attention_gate", "attention"), ("mlp_gate", "feedforward")):
                yield self._vector(name, f"post_{part}_residual_gate.gate", Keep.FLOAT32)
        if spec.scales_residual:
            for part in ("attention", "mlp"):
                paths = (f"post_{part}_residual_scale.{each}" for each in RESIDUAL_SCALES)
                yield Slot(f"{part}_residual", tuple(SlotTensor(it, (self._hidden,)) for it in paths), Keep.PLAIN)

    def _further(self) -> Iterator[Slot]:
        """Of the layer's further input, and its factor."""
        if self._spec.input_size:
            yield from self._matrices(Group.INPUT_GATE, Group.INPUT_PROJECTION)
            yield self._vector("input_norm", "input_norm.weight", Keep.NORM)
        if self._spec.scaled:
            yield Slot("scalar", (SlotTensor("layer_scalar", (1,)),), Keep.PLAIN)

    def _around(self, *names: str) -> Iterator[Slot]:
        """Norms of these names that the layer has."""
        weight, bias, length = "weight", "bias", (self._hidden,)
        for name in (name for name in names if name in self._norms):
            is_bare = self._spec.scales_first and name == "attention_out_norm"
            if self._norm.weightless or is_bare:
                tensors = (SlotTensor(f"{name}.{weight}", length, made=(1.0,)),)
            else:
                ends = (weight, bias) if self._norm.biased else (weight,)
                tensors = tuple(SlotTensor(f"{name}.{end}", length) for end in ends)
            yield Slot(name, tensors, Keep.NORM)
            yield from self._matrices(*NORM_GATES.get(name, ()))

    def _vector(self, name: str, path: str, keep: Keep, factor: float | None = None) -> Slot:
        """A vector as wide as the residual stream, of which every rank has all."""
        return Slot(name, (SlotTensor(path, (self._hidden,)),), keep, factor=factor)

    def _matrices(self, *groups: Group) -> Iterator[Slot]:
        """The matrices of groups that the layer has, and their biases."""
        for group in groups:
            if not (own := self._groups.get(group)):
                continue
            keep = Keep.DENSE if group is Group.KV_UP else Keep.MATRIX
            yield Slot(MATRICES[group], tuple(map(_weight, own)), keep, group)
            if any(each.path in self._biased for each in own):
                biases = tuple(_bias(each, is_stored=each.path in self._biased) for each in own)
                yield Slot(f"{MATRICES[group]}_bias", biases, Keep.PLAIN, first_rank=own[0].is_row_parallel)

    def _beside(self) -> Iterator[Slot]:
        """Of what stands beside attention: a recurrent mixer, or a low-rank product and the streams."""
        yield from self._matrices(Group.BESIDE_IN)
        second = self._spec.mixer_beside
        if second is not None and second.section_factors:
            (inputs,) = self._groups[Group.BESIDE_IN]
            made = SlotTensor("", (inputs.outputs,), _rows(inputs), made=second.section_factors)
            yield Slot("beside_factors", (made,), Keep.PLAIN)
        yield from self._matrices(Group.BESIDE_OUT)
        streams = self._spec.streams
        if isinstance(streams, StreamsSpec):
            yield from self._of_streams(streams)
        elif isinstance(streams, GatedStreamsSpec):
            yield from self._of_gates(streams)
        elif streams is not None:
            yield from self._of_connections(streams)

    def _of_streams(self, streams: StreamsSpec) -> Iterator[Slot]:
        count, hidden = streams.count, self._hidden
        yield from self._matrices(Group.LOW_RANK_DOWN, Group.LOW_RANK_UP)
        yield self._vector("low_rank_norm", "laurel.post_laurel_norm.weight", Keep.NORM)
        yield Slot("stream_router", (SlotTensor("altup.modality_router.weight", (count, hidden)),), Keep.PLAIN)
        yield self._vector("stream_router_norm", "altup.router_norm.weight", Keep.NORM, hidden**-1.0)
        for name, rows in (("prediction", count**2), ("correction", count)):
            tensor = SlotTensor(f"altup.{name}_coefs.weight", (rows, count))
            yield Slot(f"stream_{name}", (tensor,), Keep.PLAIN)
        keep = Keep.PLAIN if streams.scaled else Keep.UNUSED
        yield self._vector("stream_scale", "altup.correct_output_scale", keep)

    def _of_gates(self, streams: GatedStreamsSpec) -> Iterator[Slot]:
        """Of what takes of several streams, and of a table that is added to them."""
        width = (streams.count * self._hidden,)
        for part, groups in STREAM_GATES.items():
            if part != "join" or self._spec.joins:
                yield Slot(f"{part}_streams_norm", (SlotTensor(f"streams.{part}_norm.weight", width),), Keep.NORM)
                yield from self._matrices(*groups)
        if (lookup := self._spec.lookup) is None:
            return
        yield from self._matrices(Group.LOOKUP_IN)
        for name in ("norm_key", "norm_query", "norm_conv"):
            yield Slot(f"lookup_{name}", (SlotTensor(f"ple.{name}.weight", width),), Keep.NORM)
        for path, tensor in lookup.tensors.items():
            yield Slot(f"{LOOKUP}.{path}", (SlotTensor(path, tensor.shape),), Keep.FLOAT32)
        yield Slot(LOOKUP_TABLE, (SlotTensor(TABLE, lookup.table_shape),), Keep.TABLE)

    def _of_connections(self, hyper: HyperConnectionSpec) -> Iterator[Slot]:
        """Of the hyper-connections of both parts: see `CONNECTIONS`."""
        ends = {"fn": (hyper.rows, hyper.count * self._hidden), "base": (hyper.rows,), "scale": (hyper.scales,)}
        for path, names in CONNECTIONS.items():
            for name, (end, shape) in zip(names, ends.items(), strict=True):
                yield Slot(name, (SlotTensor(f"{path}.{end}", shape),), Keep.FLOAT32)

    def _mixture(self, spec: Experts) -> Iterator[Slot]:
        """Of the layer's mixture of experts. What chooses among experts is float32 whatever the model's dtype."""

        def small(name: str, path: str, *shape: int, has: object = True) -> Iterator[Slot]:
            if has:
                yield Slot(f"{EXPERTS}.{name}", (SlotTensor(path, shape),), Keep.FLOAT32)

        routing, count = spec.routing, (spec.choices,)
        yield from self._before_router(spec.router_size)
        yield from small("router", "mlp.gate.weight", *count, spec.router_size or self._hidden)
        yield self._of_experts("gate_up", Group.EXPERT_GATE_UP, spec.count)
        yield self._of_experts("down", Group.EXPERT_DOWN, spec.count)
        yield from small("correction", CORRECTION, *count, has=routing.corrected)
        yield from small("factors", "router.per_expert_scale", *count, has=routing.scaled)
        for name, group in (("shared_gate_up", Group.SHARED_GATE_UP), ("shared_down", Group.SHARED_DOWN)):
            if own := self._groups.get(group):
                yield Slot(f"{EXPERTS}.{name}", tuple(map(_weight, own)), Keep.EXPERT, group)
        yield from small("shared_gate", "mlp.shared_expert_gate.weight", 1, self._hidden, has=spec.shared_gate)
        yield from small("router_bias", "mlp.gate.bias", *count, has=routing.bias)
        if spec.biased:
            yield self._of_experts("gate_up_bias", Group.EXPERT_GATE_UP, spec.count, is_bias=True)
            yield self._of_experts("down_bias", Group.EXPERT_DOWN, spec.count, is_bias=True)
        if (latent := spec.latent) is not None:
            yield from self._matrices(Group.LOW_RANK_DOWN, Group.LOW_RANK_UP)
            has_norms = latent.eps is not None
            if has_norms:
                yield Slot("latent_norm", (SlotTensor("mlp.pre_expert_norm.weight", (latent.size,)),), Keep.NORM)
            yield from small("out_norm", "mlp.experts.post_expert_norm.weight", latent.size, has=has_norms)
        if spec.has_sum_bias:
            yield self._bias_of_sum("experts_bias", "mlp.bias")
        yield from small("scale", "mlp.gate.global_scale", 1, has=spec.sinks)
        yield from self._further_experts(spec)

    def _further_experts(self, spec: Experts) -> Iterator[Slot]:
        """Of those beside the experts that every token may go to."""
        if spec.image_size:
            yield from self._of_images(spec)
        if spec.sinks:
            yield from self._of_sinks(spec)

    def _of_sinks(self, spec: Experts) -> Iterator[Slot]:
        """Of the experts that every token goes to, and the router's rows of them."""
        count, own = spec.sinks, spec.of_sinks.projections(self._hidden)
        yield Slot(f"{SINK_EXPERTS}.router", (SlotTensor(SINK_ROUTER, (count, self._hidden)),), Keep.FLOAT32)
        for name, group in (("gate_up", Group.EXPERT_GATE_UP), ("down", Group.EXPERT_DOWN)):
            of_group = [each.of_expert(number) for number in range(count) for each in own if each.group is group]
            paths = (each.path.replace("mlp.experts.", "mlp.sink_experts.") for each in of_group)
            every = zip(of_group, paths, strict=True)
            tensors = tuple(_weight(replace(each, path=path)) for each, path in every)
            yield Slot(f"{SINK_EXPERTS}.{name}", tensors, Keep.EXPERT, count=count)

    def _before_router(self, size: int) -> Iterator[Slot]:
        """Of the small network before the router, of this width; 0: there is none."""
        yield from self._matrices(*ROUTER_GROUPS)
        if size:
            yield Slot("routed_norm", (SlotTensor("mlp.router.norm.weight", (size,)),), Keep.NORM)
        if self._spec.takes_routed:
            yield Slot("routed_scale", (SlotTensor("mlp.router.states_scale", (size,)),), Keep.PLAIN)

    def _of_images(self, spec: Experts) -> Iterator[Slot]:
        """Of the experts of images' positions, whose numbers go on behind the others'."""
        count, own = spec.count, spec.of_images.projections(self._hidden)
        small, large = (Keep.FLOAT32, Keep.EXPERT) if spec.sees else (Keep.UNUSED, Keep.UNUSED)
        yield Slot(f"{IMAGE_EXPERTS}.router", (SlotTensor(IMAGE_ROUTER, (count, self._hidden)),), small)
        for name, group in (("gate_up", Group.EXPERT_GATE_UP), ("down", Group.EXPERT_DOWN)):
            of_group = [each for each in own if each.group is group]
            numbers = range(count, 2 * count)
            tensors = tuple(_weight(each.of_expert(number)) for number in numbers for each in of_group)
            yield Slot(f"{IMAGE_EXPERTS}.{name}", tensors, large, count=count)
        if spec.routing.corrected:
            yield Slot(f"{IMAGE_EXPERTS}.correction", (SlotTensor(IMAGE_CORRECTION, (count,)),), small)

    def _of_queries(self, mixer: AttentionSpec, count: int) -> Iterator[Slot]:
        """Of experts of queries and of outputs, which ranks share by heads of keys and values."""
        size, heads, at = mixer.kv_size, mixer.num_kv_heads, "self_attn.experts"
        rows = ((size, heads),)
        queries = (SlotTensor(f"{at}.{each}.q_proj.weight", (size, self._hidden), rows) for each in range(count))
        outputs = (
            SlotTensor(f"{at}.{each}.o_proj.weight", (self._hidden, size), columns=heads) for each in range(count)
        )
        yield Slot(f"{QUERY_EXPERTS}.queries", tuple(queries), Keep.EXPERT, count=count)
        yield Slot(f"{QUERY_EXPERTS}.outputs", tuple(outputs), Keep.EXPERT, count=count)
        yield self._bias_of_sum("outputs_bias", f"{at}.bias")

    def _bias_of_sum(self, name: str, path: str) -> Slot:
        """The bias of a sum of experts' outputs."""
        return Slot(name, (SlotTensor(path, (self._hidden,)),), Keep.PLAIN, first_rank=True)

    def _of_experts(self, name: str, group: Group, count: int, *, is_bias: bool = False) -> Slot:
        """A list of weights of all experts, or of their biases."""
        own, make = self._groups[group], _bias if is_bias else _weight
        keep = Keep.PLAIN if is_bias else Keep.EXPERT
        tensors = tuple(make(each.of_expert(number)) for number in range(count) for each in own)
        first_rank = is_bias and own[0].is_row_parallel
        return Slot(f"{EXPERTS}.{name}", tensors, keep, None if is_bias else group, first_rank, count=count)


def _of_indexer(index: IndexerSpec, hidden: int) -> Iterator[Slot]:
    """The norms of its keys and of what its queries are made of, how these grow, and what makes keys of pools."""
    at, width = "self_attn.indexer", index.key_dim
    ends = tuple(SlotTensor(f"{at}.k_norm.{end}", (width,)) for end in ("weight", "bias"))
    yield Slot("index_norm", ends, Keep.NORM)
    if index.pool:
        yield Slot("index_gates", (SlotTensor(f"{at}.index_kpool_compress_gate", (width, hidden)),), Keep.PLAIN)
        yield Slot("index_biases", (SlotTensor(f"{at}.index_kpool_compress_ape", (index.pool, width)),), Keep.FLOAT32)
    if index.norms_input:
        ends = tuple(SlotTensor(f"{at}.q_input_norm.{end}", (hidden,)) for end in ("weight", "bias"))
        yield Slot("index_input_norm", ends, Keep.NORM)
    if index.grows:
        parts = (f"{at}.softmax_scaling.{part}" for part in ("scale", "bias"))
        yield Slot("index_growth", tuple(SlotTensor(path, (index.heads,)) for path in parts), Keep.PLAIN)


def _of_attention(mixer: AttentionSpec) -> Iterator[Slot]:
    """What attention has beside matrices and what is done to heads."""
    heads = mixer.num_heads
    if mixer.sinks:
        keep = Keep.PLAIN if mixer.latent is None else Keep.FLOAT32
        yield Slot("sinks", (SlotTensor("self_attn.sinks", (heads,), ((heads, heads),)),), keep)
    if slopes := mixer.slopes:
        yield Slot("slopes", (SlotTensor("", (heads,), ((heads, heads),), made=slopes),), Keep.FLOAT32)
    if (relative := mixer.relative) is not None:
        tensor = SlotTensor("self_attn.rel_logits_proj.proj", (relative.dim, relative.extent))
        yield Slot("profiles", (tensor,), Keep.PLAIN)
    if (difference := mixer.difference) is not None:
        names = (f"self_attn.lambda_{name}" for name in ("q1", "k1", "q2", "k2"))
        yield Slot("difference", tuple(SlotTensor(each, (difference.key_dim,)) for each in names), Keep.PLAIN)
    if mixer.inner_norm:
        yield Slot(
            "attention_inner_norm", (SlotTensor("self_attn.attn_sub_norm.weight", (mixer.out_size,)),), Keep.NORM
        )


def _of_recurrent(mixer: RecurrentSpec, around: str = "") -> Iterator[Slot]:
    """A recurrent mixer's own tensors, and the norms between its two parts. around: the beginning of paths."""
    for path, tensor in mixer.tensors.items():
        own = SlotTensor(around + path, tensor.shape, tensor.sections)
        yield Slot(f"{RECURRENT}.{path}", (own,), Keep.FLOAT32)
    if (inner := mixer.inner) is not None and inner.norm is not None:
        made = (1.0,) if inner.norm.weightless else ()
        for name, width in (("dt", inner.rank), ("b", inner.state), ("c", inner.state)):
            yield Slot(f"{name}_norm", (SlotTensor(f"mamba.{name}_layernorm.weight", (width,), made=made),), Keep.NORM)


def _of_heads(mixer: AttentionSpec) -> Iterator[Slot]:
    """Norms of queries and keys, or of their latents."""
    if (latent := mixer.latent) is not None:
        yield from _of_latents(latent, mixer)
        return
    if mixer.head_norm in (None, HeadNorm.BARE):
        return
    if mixer.head_norm in (HeadNorm.ALL, HeadNorm.OWN):
        widths = {"q_norm": (mixer.q_size, mixer.num_heads), "k_norm": (mixer.kv_size, mixer.num_kv_heads)}
    else:
        widths = {"q_norm": (mixer.head_dim, 0), "k_norm": (mixer.head_dim, 0)}
    ends = ("weight", "bias") if mixer.head_norm is HeadNorm.BIASED else ("weight",)
    for name, (width, units) in widths.items():
        if width and not (mixer.shares_kv and name == "k_norm"):
            rows = ((width, units),) if units else ()
            yield Slot(name, tuple(SlotTensor(f"self_attn.{name}.{end}", (width,), rows) for end in ends), Keep.NORM)


def _of_latents(latent: LatentSpec, mixer: AttentionSpec) -> Iterator[Slot]:
    """Norms of latents, and of the rotated key, each in a tensor of its own; how queries grow."""
    if mixer.grows:
        heads, parts = mixer.num_heads, (f"self_attn.softmax_scaling.{part}" for part in ("scale", "bias"))
        yield Slot("growth", tuple(SlotTensor(path, (heads,), ((heads, heads),)) for path in parts), Keep.PLAIN)
    widths = (
        ("q_norm", latent.q_rank, latent.q_factor),
        ("k_norm", latent.kv_rank * (not mixer.shares_kv), latent.kv_factor),
        ("k_rotated_norm", latent.rotated_dim * latent.norms_key, 1.0),
    )
    for name, width, factor in widths:
        if width:
            tensors = (SlotTensor(f"self_attn.{name}.weight", (width,)),)
            yield Slot(name, tensors, Keep.NORM, factor=None if factor == 1.0 else factor)


def _rows(projection: Projection) -> tuple[tuple[int, int], ...]:
    """See `SlotTensor.rows`."""
    if projection.is_replicated or projection.is_row_parallel:
        return ()
    widths = projection.sections or (projection.outputs,)
    return tuple(zip(widths, projection.section_units or (projection.units,) * len(widths), strict=True))


def _weight(projection: Projection) -> SlotTensor:
    shape = projection.outputs, projection.inputs
    columns = projection.units if projection.is_row_parallel else 0
    return SlotTensor(f"{projection.path}.weight", shape, _rows(projection), columns)


def _bias(projection: Projection, *, is_stored: bool = True) -> SlotTensor:
    """Zeros if the projection has none, beside others that do."""
    rows = _rows(projection)
    made = () if is_stored else (0.0,) * max(1, len(rows))
    return SlotTensor(f"{projection.path}.bias", (projection.outputs,), rows, made=made)


def shard_shape(shape: Sequence[int], parts: Iterable[Part]) -> tuple[int, ...]:
    """Shape of parts of a tensor, one after the other in its first dimension."""
    shapes = [part_shape(shape, part) for part in parts]
    return (sum(each[0] for each in shapes), *shapes[0][1:])


def part_shape(shape: Sequence[int], part: Part) -> tuple[int, ...]:
    """Shape of a part of a tensor; further dimensions are whole."""
    lengths = [len(range(*own.indices(length))) for own, length in zip(part, shape, strict=False)]
    return (*lengths, *shape[len(part) :])


def num_elems(tensor: SlotTensor, rank: int, size: int) -> int:
    """Elements of a rank's share of a tensor."""
    return math.prod(shard_shape(tensor.shape, tensor.share(rank, size)))
