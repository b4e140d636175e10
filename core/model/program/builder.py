"""Turns the specification of a layer into its program.

Tests: tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from ....memory.pages.projections import NORM_GATES, Group
from ..specs.attention import AttentionSpec, DifferenceSpec, LatentSpec, OutputGate, RelativeSpec
from ..specs.feed_forward import Experts, GatedSpec, LatentExperts, UngatedActivation
from ..specs.indexer import IndexerSpec, MeanIndexerSpec
from ..specs.layers import LayerSpec, MixerBeside
from ..specs.norms import BEHIND, PARALLEL, NormKind, NormSpec
from ..specs.query_experts import QueryExperts
from ..specs.recurrent import RecurrentSpec
from ..weights.slots import MATRICES, norms_of
from .factor_ops import AddGated, NormHeads, NormScaled
from .indexer_ops import Choose, ChooseBlocks, Index, IndexBlocks
from .inkling_ops import MoeWithSinks, TakeRelative
from .ops import (
    CHOSEN,
    LATE,
    STREAM,
    Activate,
    Add,
    AddMedia,
    AllReduce,
    Attend,
    Begin,
    Clip,
    Concat,
    End,
    GateOutput,
    Gemm,
    GrowHeads,
    Heads,
    LatentAttend,
    Latents,
    Mix,
    Moe,
    Norm,
    Op,
    Read,
    Replace,
    ResizeHeads,
    Scale,
    SharedExpert,
    SparseGates,
    SubtractHeads,
    Sum,
    TakeGates,
    TakeInput,
    View,
)
from .query_ops import OutputsOfExperts, QueriesOfExperts


class Kept(NamedTuple):
    """A buffer that ops of one captured piece leave to another: it needs memory that does not move."""

    name: str
    shape: tuple[int, ...]
    """The shape of one token's share."""

    is_index: bool = False
    """It holds whole numbers (int32)."""

    is_wide: bool = False
    """It holds float32 whatever the model's dtype."""


@dataclass(frozen=True, slots=True)
class LayerProgram:
    """A layer's ops, in three parts: steps with prompts are captured in pieces between the mixers."""

    before: tuple[Op, ...]
    mixers: tuple[Op, ...]
    """Those with `Op.IS_CUT`."""

    after: tuple[Op, ...]
    reads: tuple[Kept, ...] = ()
    """Buffers of `before` that later ops read, besides the residual stream and further inputs."""

    mixed: tuple[Kept, ...] = ()
    """Buffers that the mixers write."""

    earlier: LayerProgram | None = None
    """What comes before it, where a layer has several mixers, or one of several parts: up to the last but one."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of them in order."""
        return tuple(op for each in self.segments for op in each.before + each.mixers + each.after)

    @property
    def segments(self) -> tuple[LayerProgram, ...]:
        """Programs of one mixer, or of one part of a mixer, each."""
        return (self,) if self.earlier is None else (*self.earlier.segments, self)


class LayerBuilder:
    """Appends the ops of a layer whose residual is one stream."""

    def __init__(self, spec: LayerSpec, norm: NormSpec) -> None:
        self.spec, self.norm = spec, norm
        self.parts: tuple[list[Op], list[Op], list[Op]] = ([], [], [])
        self.reads: list[Kept] = []
        self.mixed: list[Kept] = []
        self.earlier: LayerProgram | None = None
        self._norms = norms_of(spec)
        self._ops = self.parts[0]
        self._rows: Read = STREAM

    def build(self) -> None:
        """Append them."""
        spec = self.spec
        if spec.mixer is None:
            self._ops = self.parts[2]
        else:
            rows = self._normed(STREAM, "attention_norm")
            self._inputs(spec.mixer, rows)
            if spec.norms in PARALLEL:
                rows = self._normed(STREAM, "mlp_norm") if "mlp_norm" in self._norms else rows
                self._add(self._output(self._feed_forward(rows), "mlp_out_norm"))
            self._add(self._output(self._mixed(spec.mixer), "attention_out_norm"), "attention_gate")
            self._behind("attention_out_norm")
        if spec.feed_forward is not None and (spec.mixer is None or spec.norms not in PARALLEL):
            self._ops.append(Begin("mlp"))
            rows = self._normed(STREAM, "mlp_norm")
            y = self._output(self._own_parts(rows), "mlp_out_norm")
            self._ops.append(End())
            self._add(y, "mlp_gate")
            self._behind("mlp_out_norm")
        self._at_end()

    def _at_end(self) -> None:
        """Append what follows a layer's parts."""
        spec = self.spec
        if spec.takes_late:
            self._add(LATE)
        if spec.input_size:
            self._add(self._further(STREAM))
        if spec.scaled:
            self._put(Scale(STREAM, STREAM, weight="scalar", in_place=True))
        if spec.media_part:
            self._put(AddMedia(STREAM, spec.media_part))

    def _put(self, op: Op) -> str:
        """Append an op; returns the buffer that it writes first."""
        self._ops.append(op)
        return op.writes[0]

    def _gemm(self, group: Group, read: Read, out: str) -> str:
        return self._put(Gemm(group, read, out, MATRICES[group]))

    def _add(self, y: str, gate: str = "") -> None:
        temperature = self.spec.residual_temperature if gate else None
        self._put(Add(STREAM, y) if temperature is None else AddGated(STREAM, y, gate, temperature))

    def _behind(self, slot: str) -> None:
        """Norm the residual stream itself, where the layer has a norm behind this addition."""
        if self.spec.norms in BEHIND and slot in self._norms:
            self._put(Norm(STREAM, "n", slot, self.norm))
            self._put(Replace(STREAM, "n"))

    def _normed(self, read: str, slot: str, out: str = "n") -> str:
        """The norm of a buffer; the buffer itself if the layer does not have that norm."""
        if slot not in self._norms:
            return read
        n, gates = self._put(Norm(read, out, slot, self.norm)), self.spec.norm_gates
        if gates is None or slot not in gates.norms:
            return n
        down, up = NORM_GATES[slot]
        low = self._gemm(down, n, "l")
        low = self._put(GateOutput(low, low, "l"))  # that is silu
        return self._put(GateOutput(n, self._gemm(up, low, "l"), n))

    def _scaled(self, read: Read, factor: float, out: str) -> Read:
        return read if factor == 1.0 else self._put(Scale(read, out, factor))

    def _output(self, y: str, slot: str, norms: tuple[str, ...] | None = None) -> str:
        """What a part adds to the residual stream."""
        if slot in (self._norms if norms is None else norms) and self.spec.norms not in BEHIND:
            norm = self.norm if (eps := self.spec.out_eps) is None else replace(self.norm, eps=eps)
            is_scaled = self.spec.scales_first and slot == "mlp_out_norm"
            self._put(NormScaled(y, y, slot, norm.eps) if is_scaled else Norm(y, y, slot, norm))
        self._scaled(y, self.spec.residual_multiplier, y)
        return y

    def _inputs(self, mixer: AttentionSpec | RecurrentSpec, rows: Read) -> None:
        """What the mixers read; keys and values are written."""
        second, self._rows = self.spec.mixer_beside, rows
        if second is not None:
            self._gemm(Group.BESIDE_IN, self._scaled(rows, second.in_factor, "r"), "r")
            if second.section_factors:
                self._put(Scale("r", "r", weight="beside_factors"))
            rows = self._scaled(rows, second.attention_in, "n")
        self._gemm(Group.MIXER_IN, rows, "in")
        if isinstance(mixer, AttentionSpec) and mixer.clip is not None:
            self._put(Clip("in", mixer.clip))
        if isinstance(mixer, AttentionSpec) and mixer.latent is None:
            self._values(mixer)
        if isinstance(mixer, RecurrentSpec):
            self._gates_of_latents(mixer)
            self.reads.append(Kept("in", (mixer.in_size,)))

    def _values(self, mixer: AttentionSpec) -> None:
        """Give values their factor, and the width of keys, as which pages have them."""
        if mixer.difference is not None:
            self._pairs(mixer, mixer.difference)
            return
        first = mixer.q_rows + mixer.kv_size
        if mixer.value_factor != 1.0:
            self._put(Scale(View("in", first), "in", mixer.value_factor, in_place=True))
        if mixer.value_dim is not None:
            self._put(ResizeHeads("in", "in", first, mixer.value_dim, mixer.head_dim))

    def _pairs(self, mixer: AttentionSpec, spec: DifferenceSpec) -> None:
        """Give heads of keys pairs of values, and queries and keys as many elements."""
        key, wide, first = spec.key_dim, mixer.head_dim, (mixer.num_heads + mixer.num_kv_heads) * spec.key_dim
        rows = self._put(ResizeHeads(View("in", 0, first), "qk", 0, key, wide))
        values = self._put(ResizeHeads(View("in", first), "v", 0, key, key, spec.pairs(mixer.num_kv_heads)))
        self._put(Concat((rows, values), "in"))

    def _queries(self, mixer: AttentionSpec) -> None:
        """Make queries of the mixer's input, and write keys and values."""
        if (latent := mixer.latent) is not None:
            self._latents(mixer, latent)
        else:
            gates, heads = None if mixer.output_gate is None else "gates", "in"
            if (index := mixer.block_indexer) is not None:
                first, key = -index.query_size - index.key_dim, View("in", -index.key_dim)
                self._put(IndexBlocks(View("in", first, key.begin), key, "iq", mixer, index, self.norm))
                heads = View("in", 0, first, copied=True)
            if mixer.query_experts is not None:
                heads = self._of_experts(mixer, mixer.query_experts)
            if mixer.relative is not None:
                heads = self._relative(mixer, mixer.relative)
            self._put(Heads(heads, "q", gates, mixer, self.norm))
        self.reads.append(Kept("q", (mixer.num_heads, mixer.query_dim)))
        if mixer.output_gate is not None:
            self.reads.append(Kept("gates", (mixer.gate_size,)))

    def _relative(self, mixer: AttentionSpec, spec: RelativeSpec) -> View:
        """Take relative states from behind queries, keys and values, which it returns."""
        size = mixer.num_heads * spec.dim
        self._put(TakeRelative(View("in", -size), "rel", mixer))
        self.reads.append(Kept("rel", (size,)))
        return View("in", 0, -size, copied=True)

    def _of_experts(self, mixer: AttentionSpec, experts: QueryExperts) -> str:
        """Queries of experts, with the keys and values that all of them share."""
        logits, count = View("in", -experts.count), (experts.per_token,)
        q = self._put(QueriesOfExperts(self._rows, logits, "eq", "ec", "ew", mixer, experts))
        self.reads += [Kept("ec", count, is_index=True), Kept("ew", count, is_wide=True)]
        return self._put(Concat((q, View("in", 0, logits.begin)), "in"))

    def _latents(self, mixer: AttentionSpec, latent: LatentSpec) -> None:
        index = mixer.indexer
        behind = 0 if index is None else -index.key_dim - index.heads
        end = behind - mixer.num_heads * latent.input_gate(mixer.output_gate)
        begin = end - (0 if mixer.shares_kv else latent.kv_rank + latent.rotated_dim)
        queries: Read = View("in", 0, begin or None)
        if index is not None and index.norms_input:
            self._gemm(Group.INDEX_UP, self._put(Norm(self._rows, "ni", "index_input_norm", _layer_norm(index))), "ih")
        if latent.q_rank:
            queries = self._of_low_rank(latent, index, queries)
        if index is not None:
            if index.grows:
                self._put(GrowHeads("ih", "ih", index.heads, "index_growth"))
            self._put(_index(index, behind, self._rows))
            queries = queries if index.apart else View("qh", 0, -index.query_size)
        if mixer.grows:
            queries = self._put(GrowHeads(queries, "qh", mixer.num_heads, "growth"))
        queries = self._without_gates(mixer, latent, queries, View("in", end, behind or None))
        kept = None if mixer.shares_kv else self._kept(latent, View("in", begin, end or None))
        self._put(Latents(queries, kept, "q", mixer, latent))

    def _without_gates(self, mixer: AttentionSpec, latent: LatentSpec, queries: Read, gates: View) -> Read:
        """Take gates of attention's output from behind each query, or those of heads; returns the queries."""
        if mixer.output_gate in (OutputGate.APART, OutputGate.OF_HEADS):
            self._put(TakeGates(gates, "gates", mixer.num_heads, latent.value_dim))
        if mixer.output_gate is not OutputGate.BESIDE_QUERIES:
            return queries
        self._put(TakeGates(queries, "gates", mixer.num_heads, latent.value_dim))
        return self._put(ResizeHeads(queries, "qh", 0, mixer.query_dim + latent.value_dim, mixer.query_dim))

    def _of_low_rank(self, latent: LatentSpec, index: IndexerSpec | None, given: Read) -> Read:
        """Queries of their latents, and an indexer's, which has them beside attention's or apart."""
        low = self._put(Norm(given, "ql", "q_norm", NormSpec(latent.eps)))
        if index is not None and index.apart and not index.norms_input:
            self._gemm(Group.INDEX_UP, low, "ih")
        low = self._put(Concat((low, given), "ql")) if latent.both else low
        return self._gemm(Group.QUERY_UP, low, "qh")

    def _kept(self, latent: LatentSpec, kept: View) -> Read:
        """The latent and the key of all heads, which may have a norm."""
        if not latent.norms_key:
            return kept
        middle = kept.begin + latent.kv_rank
        key = self._put(Norm(View("in", middle, kept.end), "kr", "k_rotated_norm", NormSpec(latent.eps)))
        return self._put(Concat((View("in", kept.begin, middle), key), "kv"))

    def _gates_of_latents(self, mixer: RecurrentSpec) -> None:
        """Put decays and gates in place of their latents: see `RecurrentSpec.input_parts`."""
        if mixer.input_parts is None:
            return
        ends = list(accumulate(mixer.input_parts))
        first, further = View("in", 0, ends[0]), View("in", ends[1], ends[2])
        gates, decays = View("in", ends[0], ends[1], copied=True), View("in", ends[2], ends[3], copied=True)
        og = self._gemm(Group.OUTPUT_GATE_UP, gates, "og")
        de = self._gemm(Group.DECAY_UP, decays, "de")
        self._put(Concat((first, og, further, de), "in"))

    def _mixed(self, mixer: AttentionSpec | RecurrentSpec) -> str:
        """Run the mixers, and what stands between them and the residual stream."""
        if isinstance(mixer, AttentionSpec):
            self._queries(mixer)
        x = "in" if isinstance(mixer, AttentionSpec) else self._second_part(mixer)
        second, self._ops = self.spec.mixer_beside, self.parts[1]
        if isinstance(mixer, RecurrentSpec):
            self._put(Mix(x, "a", mixer))
            self.mixed.append(Kept("a", (mixer.out_size,)))
        else:
            self._put(self._attend(mixer))
            self.mixed.append(Kept("a", (mixer.num_heads, mixer.attended_dim)))
        if second is not None:
            self._put(Mix("r", "m", second.mixer))
            self.reads.append(Kept("r", (second.mixer.in_size,)))
            self.mixed.append(Kept("m", (second.mixer.out_size,)))
        self._ops = self.parts[2]
        if isinstance(mixer, AttentionSpec):
            self._attended(mixer)
        self._project(mixer)
        if second is not None:
            self._beside_output(second)
        return self._put(AllReduce("y"))

    def _attended(self, mixer: AttentionSpec) -> None:
        """Make the output projection's input of what attention gives."""
        if mixer.head_out_eps is not None:
            self._put(NormHeads("a", "a", mixer.attended_dim, mixer.head_out_eps))
        if mixer.output_gate is not None:
            self._put(GateOutput("a", "gates", "a", mixer.softplus_gates))
        if mixer.difference is not None:
            self._put(SubtractHeads("a", "a", mixer, mixer.difference, self.norm.eps))
        elif mixer.value_dim is not None:
            self._put(ResizeHeads("a", "a", 0, mixer.head_dim, mixer.value_dim))
        if mixer.inner_norm:
            self._put(Norm("a", "a", "attention_inner_norm", self.norm))

    def _project(self, mixer: AttentionSpec | RecurrentSpec) -> str:
        """The product of a mixer's output, or those of experts."""
        if isinstance(mixer, AttentionSpec) and (experts := mixer.query_experts) is not None:
            return self._put(OutputsOfExperts("a", "ec", "ew", "y", mixer, experts))
        return self._gemm(Group.MIXER_OUT, "a", "y")

    def _second_part(self, mixer: RecurrentSpec) -> str:
        """Return the buffer that the mixer reads. A mixer of two parts: its first part becomes a program of its own."""
        if (inner := mixer.inner) is None:
            return "in"
        given = Kept("c", (mixer.channels,))
        first = Mix("in", given.name, mixer, is_first=True)
        self.earlier = LayerProgram(tuple(self.parts[0]), (first,), (), tuple(self.reads), (given,))
        self.parts = [], [], []
        self._ops = self.parts[0]
        low = self._gemm(Group.SCAN_IN, given.name, "low")
        self._put(AllReduce(low))
        ends = [*accumulate((inner.rank, inner.state, inner.state), initial=0)]
        parts: list[Read] = []
        for name, begin, end in zip(("dt", "b", "c"), ends, ends[1:], strict=False):
            part: Read = View(low, begin, end, copied=name == "dt")
            if inner.norm is not None:
                part = self._put(Norm(View(low, begin, end), f"{name}n", f"{name}_norm", inner.norm))
            parts.append(part)
        steps = self._gemm(Group.DECAY_UP, parts[0], "de")
        gates = View("in", mixer.channels)
        self._put(Concat((given.name, steps, *parts[1:], gates), "sc"))
        self.reads = [Kept("sc", (mixer.channels + 2 * inner.state + mixer.in_size,))]
        return "sc"

    def _attend(self, mixer: AttentionSpec) -> Op:
        """Attention; what chooses its tokens is appended before it."""
        if (blocks := mixer.block_indexer) is not None:
            self.reads.append(Kept("iq", (blocks.heads, blocks.key_dim)))
            k_norm = "index_k_norm" if isinstance(blocks, MeanIndexerSpec) else None
            self._put(ChooseBlocks("iq", CHOSEN, mixer, blocks, self.norm, k_norm))
            return Attend("q", "a", mixer, chosen=CHOSEN)
        if (latent := mixer.latent) is None:
            return Attend("q", "a", mixer, relative=None if mixer.relative is None else "rel")
        if (index := mixer.indexer) is not None:
            self.reads += [Kept("iq", (index.heads, index.key_dim)), Kept("iw", (index.heads,))]
            self._put(Choose("iq", "iw", CHOSEN, mixer, "index_biases" if index.pool else None))
        chosen, sinks = None if mixer.top_k is None else CHOSEN, "sinks" if mixer.sinks else None
        return LatentAttend("q", "a", mixer, latent, chosen=chosen, sinks=sinks)

    def _beside_output(self, second: MixerBeside) -> None:
        """Add the output of the mixer beside attention."""
        self._scaled("y", second.attention_out, "y")
        self._gemm(Group.BESIDE_OUT, "m", "z")
        self._scaled("z", second.out_factor, "z")
        self._put(Sum("y", "z", "y"))

    def _feed_forward(self, rows: str) -> str:
        """The feed-forward part."""
        spec = self.spec.feed_forward
        if isinstance(spec, Experts):
            return self._experts(spec, rows, "y")
        assert spec is not None, "the layer has the part"
        self._gate_up(rows)
        if isinstance(spec, GatedSpec):
            if spec.gate_factor != 1.0:
                self._put(Scale(View("gu", 0, spec.size), "gu", spec.gate_factor, in_place=True))
            if spec.sparsity:
                self._put(SparseGates("gu", "gu", spec.sparsity))
        is_xielu = spec.activation is UngatedActivation.XIELU
        self._put(Activate("gu", "f", spec.activation, "xielu" if is_xielu else None))
        if isinstance(spec, GatedSpec) and spec.inner_norm:
            self._put(Norm("f", "f", "mlp_inner_norm", self.norm))
        self._gemm(Group.DOWN, "f", "y")
        self._put(AllReduce("y"))
        self._scaled("y", spec.factor if isinstance(spec, GatedSpec) else 1.0, "y")
        if isinstance(spec, GatedSpec) and spec.scaled:
            self._put(Scale("y", "y", weight="mlp_scale"))
        return "y"

    def _gate_up(self, rows: str) -> None:
        self._gemm(Group.GATE_UP, rows, "gu")

    def _experts(self, spec: Experts, rows: str, out: str, routed: str | None = None) -> str:
        if spec.latent is not None:
            self._experts_of_latents(spec, spec.latent, rows, out)
        else:
            self._put(MoeWithSinks(rows, out, spec) if spec.sinks else Moe(rows, routed, out, spec))
            self._put(AllReduce(out))
        self._scaled(out, spec.factor, out)
        return out

    def _experts_of_latents(self, spec: Experts, latent: LatentExperts, rows: str, out: str) -> None:
        """See `LatentExperts`."""
        low = self._gemm(Group.LOW_RANK_DOWN, rows, "l")
        low = low if latent.eps is None else self._put(Norm(low, "ln", "latent_norm", self.norm))
        self._put(Moe(low, rows, out, spec))
        self._put(AllReduce(out))
        self._gemm(Group.LOW_RANK_UP, out, out)
        if spec.shared_size:
            self._put(SharedExpert(rows, "sh", spec))
            self._put(AllReduce("sh"))
            self._put(Sum(out, "sh", out))

    def _own_parts(self, rows: str) -> str:
        """The feed-forward part and the mixture beside it, whose output may be added by the next layer."""
        if (beside := self.spec.beside) is None:
            return self._feed_forward(rows)
        if not self.spec.is_late:
            return self._side_by_side(beside, rows)
        self._experts(beside, rows, LATE)
        return self._feed_forward(rows)

    def _side_by_side(self, experts: Experts, rows: str) -> str:
        """The sum of the gated part and of a mixture of experts, which read the same residual stream (Gemma 4)."""
        own = ("dense_out_norm", "experts_out_norm")
        y = self._output(self._feed_forward(rows), own[0], own)
        self._put(Norm(STREAM, "e", "experts_norm", self.norm))
        self._put(Norm(STREAM, "r", "router_norm", self.norm))
        z = self._output(self._experts(experts, "e", "z", "r"), own[1], own)
        return self._put(Sum(y, z, "y"))

    def _further(self, rows: str) -> str:
        """What a further input adds to the residual stream; see `LayerInputSpec`."""
        spec = self.spec.dense
        assert isinstance(spec, GatedSpec), "a layer with inputs has a gated part"
        gate = self._gemm(Group.INPUT_GATE, rows, "g")
        self._put(Concat((gate, self._put(TakeInput())), "g"))
        self._put(Activate("g", "f", spec.activation))
        self._gemm(Group.INPUT_PROJECTION, "f", "y")
        return self._output("y", "input_norm", ("input_norm",))


def _layer_norm(index: IndexerSpec) -> NormSpec:
    """Of what the indexer's queries are made of."""
    return NormSpec(index.eps, NormKind.BIASED_LAYER, wide=True)


def _index(index: IndexerSpec, behind: int, rows: Read) -> Index:
    """behind: the first of the mixer's inputs that are the indexer's, from their end. rows: what they are made of."""
    queries: Read = "ih" if index.apart else View("qh", -index.query_size)
    key, factors = View("in", behind, -index.heads), View("in", -index.heads)
    pooled = (rows, "index_gates") if index.pool else (None, None)
    return Index(queries, key, factors, "iq", "iw", index, "index_norm", *pooled)
