"""Small models of every kind of dense layer: for the native decoder, and as plain arithmetic in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.families.falcon_h1.layer import FactoredLayer
from chorus.core.model.families.gemma_4.layer import Gemma4Layer
from chorus.core.model.lora.lora_state import rows_in
from chorus.core.model.native_names import native_norm
from chorus.core.model.program.native_binding import Tables, layer_bindings
from chorus.core.model.program.native_decoder import native_layer
from chorus.core.model.program.native_program import NativeProgram
from chorus.core.model.specs.attention import AttentionSpec, HeadNorm, OutputGate
from chorus.core.model.specs.feed_forward import Activation, GatedSpec, UngatedActivation, UngatedSpec
from chorus.core.model.specs.layers import LayerSpec
from chorus.core.model.specs.norms import BEHIND, NormKind, Norms, NormSpec
from chorus.core.model.specs.positions import PositionTable
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.core.model.weights.layer_weights import LayerWeights
from chorus.memory.pages.adapter_layout import AdapterLayout, uniform_parts
from chorus.memory.pages.layer_projections import gated_projections
from chorus.memory.pages.layout import PageLayout
from chorus.memory.pages.projections import Projections
from chorus.ops.cpu import native
from chorus.ops.elementwise.float8_kv import DTYPE as FLOAT8
from chorus.ops.elementwise.float8_kv import KvScales, rounded
from chorus.ops.library import native_model
from chorus.ops.lora.sgmv import AdapterRows, Segments

from ...tables import LLAMA
from ..gemm.whole_numbers import WholeNumbers

VOCAB, BLOCK, LAYERS = 97, 16, 3


@dataclass(frozen=True)
class Kind:
    """The geometry of a model's layers; layer 1 has neither window nor rope where `alternating`."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 48
    ffn: int = 80
    window: int | None = None
    chunked: bool = False
    scale: float | None = None
    softcap: float | None = None
    rotated: float = 1.0
    interleaved: bool = False
    attention_factor: float = 1.0
    alternating: bool = False
    head_norm: HeadNorm | None = None
    output_gate: OutputGate | None = None
    sinks: bool = False
    slopes: bool = False
    """Scores fall with the distance between query and key."""
    clip: float | None = None
    softplus_gates: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    scaled: bool = False
    norms: Norms = Norms.BEFORE
    norm_kind: NormKind = NormKind.RMS
    residual_multiplier: float = 1.0
    activation: Activation | UngatedActivation = Activation.SILU
    """Without a gate if it is an `UngatedActivation`."""
    gate_factor: float = 1.0
    part_factor: float = 1.0
    biased: bool = False
    embedding_multiplier: float = 1.0
    position_table: PositionTable | None = None
    embedding_norm: bool = False
    head_biased: bool = False
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    kv_scales: KvScales | None = None
    """Keys and values are in FP8, with these scales."""
    two_mixers: bool = False
    """The second layer's mixer has projections of its own, with other ids."""

    def table(self, ranks: int = 1) -> Projections:
        """Of one of so many ranks."""
        layer = composed(DecoderLayer(self.mixer.share(ranks), None), self.norm, self.hidden).projections
        other = tuple(replace(each, path=f"other.x_{each.name}") for each in layer) if self.two_mixers else layer
        feed = gated_projections(self.hidden, self.ffn // ranks)[1 - self.is_gated :]
        return Projections((layer + feed, other + feed, layer + feed))

    @property
    def is_gated(self) -> bool:
        return not isinstance(self.activation, UngatedActivation)

    @property
    def modules(self) -> list[str]:
        """Names of the first layer's projections, in order."""
        return [each.name for each in self.table().layers[0]]

    @property
    def norm(self) -> NormSpec:
        return NormSpec(1e-5, self.norm_kind)

    @property
    def rope(self) -> RopeConfig | None:
        dim = int(self.head_dim * self.rotated) // 2 * 2
        rope = RopeConfig(dim, 1e4, interleaved=self.interleaved, attention_factor=self.attention_factor)
        return rope if dim else None

    @property
    def mixer(self) -> AttentionSpec:
        """The first layer's."""
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.scale or self.head_dim**-0.5,
            self.rope,
            self.window,
            self.chunked,
            softcap=self.softcap,
            head_norm=self.head_norm,
            output_gate=self.output_gate,
            sinks=self.sinks,
            slopes=tuple(0.6 * 2.0**-head for head in range(self.heads)) if self.slopes else (),
            clip=self.clip,
            softplus_gates=self.softplus_gates,
            value_norm=self.value_norm,
            keys_are_values=self.keys_are_values,
            qkv_bias=self.biased,
            o_bias=self.biased,
        )

    def layers(self) -> tuple[LayerSpec, ...]:
        mixer, rope = self.mixer, self.rope
        part = (
            GatedSpec(self.ffn, self.activation, self.biased)
            if self.is_gated
            else UngatedSpec(self.ffn, self.activation, self.biased)
        )
        factors = {"gate_factor": self.gate_factor, "part_factor": self.part_factor}
        layer = Gemma4Layer if self.scaled else partial(FactoredLayer, **factors)
        own = layer(mixer, part, self.norms, self.residual_multiplier)
        other = replace(own, mixer=replace(mixer, rope=replace(rope, theta=500.0) if rope else None))
        if self.alternating:
            other = replace(own, mixer=replace(mixer, rope=None, window=None, chunked=False))
        return (own, other, own)


@dataclass
class Weights:
    """A layer's weights, unpacked."""

    attention_norm: torch.Tensor | None
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    xielu: torch.Tensor | None
    scalar: torch.Tensor | None
    whole: dict[str, WholeNumbers] = field(default_factory=dict)
    """Projections that are packed as whole numbers."""

    def packed(self) -> LayerWeights:
        parts = {name: part for name, part in vars(self).items() if name != "whole"}
        for name in ("qkv", "o", "gate_up", "down"):
            parts[name] = self.whole[name].packed() if self.whole else native_model.pack(parts[name])
        return LayerWeights(**parts)


Adapter = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]
"""B · A of modules, with the scale: `a [rank, in]` and `b [out, rank]` by layer and module."""


@dataclass
class Model:
    """A random model of a kind, with pages for its sequences."""

    kind: Kind
    dtype: torch.dtype
    pages: int = 60
    seed: int = 0
    adapters: list[Adapter] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = self.kind
        self._generator = torch.Generator().manual_seed(self.seed)
        shape = LAYERS, kind.kv_heads, kind.head_dim, BLOCK, self.dtype.itemsize
        self.layout = PageLayout(*shape, float8_kv=kind.kv_scales is not None)
        q, kv, hidden = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim, kind.hidden
        self.table = kind.table()
        self.specs = kind.layers()
        self.weights = [self._layer(q, kv) for _ in range(LAYERS)]
        self.embed = self._matrix(VOCAB, hidden, 1.0)
        self.head = self._matrix(VOCAB, hidden, 2 * hidden**-0.5)
        self.norm = self._norm()
        self.head_bias = self._vector(VOCAB, 0.0, kind.head_biased)
        self.embedding_norm = self._norm(kind.embedding_norm)
        table = kind.position_table
        self.position_table = None if table is None else self._matrix(table.rows, hidden, 1.0).float()
        self.arena = torch.empty((self.pages, self.layout.page_elems), dtype=self.dtype)
        self.spoil(range(self.pages))
        self._free = list(range(1, self.pages))
        self.rows: list[list[AdapterRows]] = []
        """Of each adapter's parts."""

    def quantise(self, bits: int, group: int, zeros: bool = False) -> None:
        """Make every projection of layers whole numbers with scales."""
        for layer in self.weights:
            for name in ("qkv", "o", "gate_up", "down"):
                layer.whole[name] = WholeNumbers.of(getattr(layer, name).float(), bits, group, zeros)
                setattr(layer, name, layer.whole[name].weight)

    def native(self, positions: int) -> native_model.NativeModel:
        kind = self.kind
        return native_model.NativeModel(
            hidden=kind.hidden,
            vocab=VOCAB,
            block_tokens=BLOCK,
            eps=kind.norm.eps,
            **self.program(self.specs, self.table, [layer.packed() for layer in self.weights], positions),
            positions=positions,
            embed=self.embed,
            lm_head=native_model.pack(self.head),
            norm=self.norm,
            arena=self.arena,
            float8_kv=self.layout.float8_kv,
            norm_kind=native_norm(kind.norm_kind),
            embedding_multiplier=kind.embedding_multiplier,
            position_table=self.position_table,
            embedding_norm=self.embedding_norm,
            head_bias=self.head_bias,
            logits_scale=kind.logits_scale,
            logits_softcap=kind.logits_softcap or 0.0,
        )

    def program(
        self,
        specs: Sequence[LayerSpec],
        table: Projections,
        weights: Sequence[LayerWeights],
        positions: int,
        *,
        has_ranks: bool = False,
    ) -> dict[str, Any]:
        """The fields of a native model that say what its layers compute."""
        kind = self.kind
        written = [composed(spec, kind.norm, kind.hidden) for spec in specs]
        weights = [native_layer(*each, own.slots) for *each, own in zip(weights, specs, written, strict=True)]
        shapes = table.gemm_shapes, table.gemm_shape_of
        program = NativeProgram([each.program for each in written], kind.hidden, table, has_ranks=has_ranks)
        scales = [kind.kv_scales] * LAYERS if kind.kv_scales else ()
        ops = program.ops(layer_bindings(specs, weights, Tables.of(specs, positions), kv_scales=scales))
        own = {"num_layers": len(specs), "ops": ops, "registers": program.registers}
        return own | dict(zip(("gemm_shapes", "gemm_shape_of"), shapes, strict=True))

    def take(self, tokens: int) -> list[int]:
        """Pages for a sequence."""
        return [self._free.pop() for _ in range(-(-tokens // BLOCK))]

    def spoil(self, pages: Sequence[int]) -> None:
        """Make all keys and values in pages NaN."""
        kv = self.arena.view(FLOAT8) if self.layout.float8_kv else self.arena
        nan = torch.full(kv.shape[1:], math.nan).to(kv.dtype).view(self.arena.dtype)
        self.arena[list(pages)] = nan

    def stored(self, pages: Sequence[int], layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence's first tokens, `[kv_heads, tokens, head_dim]` float64, as they are in FP8."""
        assert self.kind.kv_scales is not None
        kv = self.arena.view(FLOAT8).view(self.pages, LAYERS, 2, BLOCK, self.kind.kv_heads, self.kind.head_dim)
        kv = kv.view(torch.uint8)[list(pages), layer].view(FLOAT8).double()
        k, v = (kv[:, side].flatten(0, 1)[:count].transpose(0, 1) for side in (0, 1))
        return k * self.kind.kv_scales.k, v * self.kind.kv_scales.v

    def add_adapter(self, rank: int = 3, scale: float = 0.5) -> int:
        """Place a random adapter of all modules in the arena; returns its number."""
        parts = uniform_parts(self.table, rank, scale)
        placed = AdapterLayout.build(parts, self.table, self.layout.page_elems, self.dtype.itemsize)
        pages = [self._free.pop() for _ in range(placed.num_pages)]
        run = torch.zeros(len(pages) * self.layout.page_elems, dtype=self.dtype)
        adapter: Adapter = {}
        for layer in range(LAYERS):
            for module, name in zip(self.table.layers[layer], self.kind.modules, strict=True):
                index, (d_in, d_out) = self.table.id(module.name), module.dims
                place = next(it for it in placed.parts if it.slabs.a_offset[index] >= 0 <= it.first_elem[layer])
                a, b = self._matrix(rank, d_in, d_in**-0.5), self._matrix(d_out, rank, 1.0)
                adapter[layer, name] = (a, scale * b.double())
                for r in range(rank):
                    row = place.first_elem[layer] + r * place.slabs.slab_elems
                    run[row + place.slabs.a_offset[index] :][:d_in] = a[r]
                    run[row + place.slabs.b_offset[index] :][:d_out] = b[:, r]
        self.arena[pages] = run.view(len(pages), -1)
        self.adapters.append(adapter)
        self.rows.append([rows_in(part, place, pages) for part, place in zip(parts, placed.parts, strict=True)])
        return len(self.rows) - 1

    def _layer(self, q: int, kv: int) -> Weights:
        kind, hidden, ffn = self.kind, self.kind.hidden, self.kind.ffn
        before = kind.norms is not Norms.AFTER and kind.norms not in BEHIND
        after = kind.norms in (Norms.AFTER, Norms.AROUND, Norms.BEHIND)
        every = kind.head_norm in (HeadNorm.ALL, HeadNorm.OWN)
        inputs = sum(each.outputs for each in self.table.layers[0] if each.product == "qkv")
        own, up = kind.head_norm not in (None, HeadNorm.BARE), ffn * (1 + kind.is_gated)
        return Weights(
            self._norm(before),
            self._norm(after or kind.norms is Norms.BEHIND_MIXER),
            self._norm(before and kind.norms is not Norms.PARALLEL),
            self._norm(after or kind.norms is Norms.AFTER_MLP),
            self._matrix(inputs, hidden, 1.5 * hidden**-0.5),
            self._matrix(hidden, q, q**-0.5),
            self._matrix(up, hidden, hidden**-0.5),
            self._matrix(hidden, ffn, ffn**-0.5),
            self._vector(inputs, 0.0, kind.biased),
            self._vector(hidden, 0.0, kind.biased),
            self._vector(up, 0.0, kind.biased),
            self._vector(hidden, 0.0, kind.biased),
            self._of_heads(q if every else kind.head_dim, own),
            self._of_heads(kv if every else kind.head_dim, own),
            self._vector(kind.heads, 1.0, kind.sinks),
            torch.tensor(kind.mixer.slopes) if kind.slopes else None,
            self._vector(4, 0.0) if kind.activation is UngatedActivation.XIELU else None,
            self._vector(1, 1.0, kind.scaled),
        )

    def _norm(self, wanted: bool = True) -> torch.Tensor | None:
        """Weights of a norm of the stream, with its biases where it has any."""
        weight = self._vector(self.kind.hidden, 1.0, wanted)
        if weight is None or not self.kind.norm.biased:
            return weight
        bias = self._vector(self.kind.hidden, 0.0)
        assert bias is not None
        return torch.stack((weight, bias))

    def _of_heads(self, size: int, wanted: bool) -> torch.Tensor | None:
        """Weights of a norm of heads, with its biases where it has any."""
        weight = self._vector(size, 1.0, wanted)
        if weight is None or self.kind.head_norm is not HeadNorm.BIASED:
            return weight
        bias = self._vector(size, 0.0)
        assert bias is not None
        return torch.stack((weight, bias))

    def _matrix(self, rows: int, columns: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(rows, columns, generator=self._generator)).to(self.dtype)

    def _vector(self, n: int, middle: float, wanted: bool = True) -> torch.Tensor | None:
        return middle + 0.2 * torch.randn(n, generator=self._generator) if wanted else None

    def tokens(self, count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=self._generator).tolist()


Part = tuple[Sequence[int], list[int], int, int, int | None]
"""A sequence's tokens, its pages, the tokens of it to compute, and its adapter."""


def step(
    decoder: native.NativeDecoder,
    model: Model,
    parts: Sequence[Part],
    *,
    merged: bool = False,
    prompt_logprobs: bool = False,
    ready: int = 0,
    max_stall: float = 0.0,
) -> list[torch.Tensor]:
    """Logits of the tokens begin … end-1 of each sequence, as many as the decoder keeps.

    merged, max_stall: see `NativeDecoder.forward`. ready: see `Segments`. prompt_logprobs: ask for all tokens' logits
    afterwards, too.
    """
    segments, at, indptr, positions, pages, ids = Segments(), 0, [0], [], [], []
    for tokens, table, begin, end, adapter in parts:
        if adapter is not None:
            for rows in model.rows[adapter]:
                segments.add(at, at + end - begin, rows, ready)
        at += end - begin
        indptr.append(at)
        positions += range(begin, end)
        pages += [table[position // BLOCK] for position in range(begin, end)]
        ids += tokens[begin:end]
    width = max(len(table) for _, table, *_ in parts)
    attention = native.NativeRows()
    attention.plan(
        indptr,
        torch.tensor([table + [0] * (width - len(table)) for _, table, *_ in parts]),
        [end for *_, end, _ in parts],
    )
    position = torch.tensor(positions)
    every = torch.arange(at)
    logits = decoder.forward(
        torch.tensor(ids),
        position,
        torch.tensor(pages),
        position % BLOCK,
        attention,
        every,
        segments,
        max_stall,
        every if prompt_logprobs else None,
        merged,
    )
    assert not segments.late
    counts = [end - begin for _, _, begin, end, _ in parts]
    return list(logits.clone().split(counts)) if len(logits) == at else []


def reference(
    model: Model, tokens: Sequence[int], adapter: int | None = None, pages: Sequence[int] | None = None
) -> torch.Tensor:
    """Logits of all tokens, in float64. pages: of a sequence that was computed, whose keys and values are in FP8: they
    are compared with their own, and attended to.
    """
    kind = model.kind
    x = model.embed.double()[list(tokens)] * kind.embedding_multiplier
    x = x if model.position_table is None else x + model.position_table[: len(tokens)].double()
    x = x if model.embedding_norm is None else norm(kind.norm, x, model.embedding_norm)
    for index, (spec, weights) in enumerate(zip(model.specs, model.weights, strict=True)):
        x = _Layer(model, index, spec, weights, adapter, pages)(x)
        x = x if weights.scalar is None else x * weights.scalar.double()
    logits = norm(kind.norm, x, model.norm) @ model.head.double().T
    logits = (logits if model.head_bias is None else logits + model.head_bias.double()) * kind.logits_scale
    if kind.logits_softcap:
        logits = kind.logits_softcap * torch.tanh(logits / kind.logits_softcap)
    return logits


def norm(spec: NormSpec, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if spec.kind is not NormKind.RMS:
        x = x - x.mean(-1, keepdim=True)
    weight, bias = weight.double().unbind() if weight.dim() == 2 else (weight.double(), 0.0)
    return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight + bias


@dataclass
class _Layer:
    """A layer as its specification says, on all tokens at once."""

    model: Model
    index: int
    spec: LayerSpec
    weights: Weights
    adapter: int | None
    pages: Sequence[int] | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, factor = self.weights, self.spec.residual_multiplier
        match self.spec.norms:
            case Norms.BEFORE:
                x = x + factor * self.mix(self.norm(x, weights.attention_norm))
                return x + factor * self.feed(self.norm(x, weights.mlp_norm))
            case Norms.AFTER:
                x = x + factor * self.norm(self.mix(x), weights.attention_out_norm)
                return x + factor * self.norm(self.feed(x), weights.mlp_out_norm)
            case Norms.AROUND:
                inner = self.mix(self.norm(x, weights.attention_norm))
                x = x + factor * self.norm(inner, weights.attention_out_norm)
                inner = self.feed(self.norm(x, weights.mlp_norm))
                return x + factor * self.norm(inner, weights.mlp_out_norm)
            case Norms.AFTER_MLP:
                x = x + factor * self.mix(self.norm(x, weights.attention_norm))
                return x + factor * self.norm(self.feed(self.norm(x, weights.mlp_norm)), weights.mlp_out_norm)
            case Norms.PARALLEL:
                n = self.norm(x, weights.attention_norm)
                return x + factor * self.mix(n) + factor * self.feed(n)
            case Norms.PARALLEL_TWO_NORMS:
                n = self.norm(x, weights.attention_norm)
                return x + factor * self.mix(n) + factor * self.feed(self.norm(x, weights.mlp_norm))
            case Norms.BEHIND:
                x = self.norm(x + factor * self.mix(x), weights.attention_out_norm)
                return self.norm(x + factor * self.feed(x), weights.mlp_out_norm)
            case Norms.BEHIND_MIXER:
                x = self.norm(x + factor * self.mix(x), weights.attention_out_norm)
                return x + factor * self.feed(x)
        raise AssertionError(self.spec.norms)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        return norm(self.model.kind.norm, x, weight)

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, modules: Sequence[str]
    ) -> torch.Tensor:
        y = x @ weight.double().T
        if bias is not None:
            y = y + bias.double()
        if self.adapter is not None:
            parts = [self.model.adapters[self.adapter][self.index, module] for module in modules]
            y = y + torch.cat([x @ a.double().T @ b.T for a, b in parts], dim=-1)
        return y

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        spec, weights = self.spec.mixer, self.weights
        separate = spec.output_gate in (OutputGate.PER_ELEMENT, OutputGate.PER_HEAD)
        names = [*LLAMA[: 2 if spec.keys_are_values else 3], *["g_proj"] * separate]
        qkv = self.project(x, weights.qkv, weights.qkv_bias, names)
        qkv = qkv if spec.clip is None else qkv.clamp(-spec.clip, spec.clip)
        values = 0 if spec.keys_are_values else spec.kv_size
        rest = qkv.shape[-1] - spec.q_rows - spec.kv_size - values
        q, k, v, gates = qkv.split([spec.q_rows, spec.kv_size, values, rest], dim=-1)
        v = k if spec.keys_are_values else v
        if spec.output_gate is OutputGate.BESIDE_QUERIES:
            q, gates = (each.flatten(1) for each in q.unflatten(-1, (-1, 2, spec.head_dim)).unbind(2))
        if spec.output_gate is OutputGate.PER_HEAD:
            gates = gates.repeat_interleave(spec.head_dim, -1)
        if spec.head_norm is HeadNorm.ALL:
            q, k = self.head_norm(q, weights.q_norm), self.head_norm(k, weights.k_norm)
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)).transpose(0, 1) for part in (q, k, v))
        if spec.value_norm:
            v = self.head_norm(v, torch.ones(spec.head_dim))
        if spec.head_norm is HeadNorm.EACH:
            q, k = self.head_norm(q, weights.q_norm), self.head_norm(k, weights.k_norm)
        if spec.head_norm is HeadNorm.BIASED:
            assert weights.q_norm is not None
            assert weights.k_norm is not None
            biased = NormSpec(self.model.kind.norm.eps, NormKind.BIASED_LAYER)
            q, k = norm(biased, q, weights.q_norm), norm(biased, k, weights.k_norm)
        if spec.head_norm is HeadNorm.OWN:
            q, k = self.own_norms(q, weights.q_norm), self.own_norms(k, weights.k_norm)
        if spec.head_norm in (HeadNorm.BARE, HeadNorm.ROTATED):
            q, k = (self.head_norm(each, torch.ones(spec.head_dim)) for each in (q, k))
        if spec.rope is not None:
            q, k = rotated(spec.rope, q), rotated(spec.rope, k)
        if spec.head_norm is HeadNorm.ROTATED:  # keys are stored without weights
            assert weights.q_norm is not None
            assert weights.k_norm is not None
            q = q * (weights.q_norm * weights.k_norm)
        if self.pages is not None:
            k, v = self.stored(k, v)
        k, v = (part.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        position = torch.arange(len(x))
        age = position[:, None] - position
        if weights.slopes is not None:
            scores = scores - weights.slopes.double()[:, None, None] * age
        seen = (age >= 0) & (age < (spec.window or len(x)))
        if spec.chunked and spec.window:
            seen = (age >= 0) & (position[:, None] // spec.window == position // spec.window)
        scores = scores.masked_fill(~seen, -math.inf)
        if weights.sinks is not None:
            scores = torch.cat((scores, weights.sinks.double()[:, None, None].expand(-1, len(x), 1)), 2)
        attended = scores.softmax(-1)[..., : len(x)] @ v
        attended = attended.transpose(0, 1).flatten(1)
        open_by = torch.nn.functional.softplus if spec.softplus_gates else torch.sigmoid
        attended = attended if spec.output_gate is None else attended * open_by(gates)
        return self.project(attended, weights.o, weights.o_bias, LLAMA[3:4])

    def head_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMSNorm, whatever the norm of the stream is."""
        assert weight is not None
        return norm(NormSpec(self.model.kind.norm.eps), x, weight)

    def own_norms(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """LayerNorm of each head `[heads, tokens, head_dim]` with weights of its own."""
        assert weight is not None
        ones = torch.ones(x.shape[-1])
        return norm(NormSpec(self.model.kind.norm.eps, NormKind.LAYER), x, ones) * weight.double().view(len(x), 1, -1)

    def stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are in pages: rounded, of numbers that are nearly these."""
        model, scales = self.model, self.model.kind.kv_scales
        assert self.pages is not None
        assert scales is not None
        found = model.stored(self.pages, self.index, k.shape[1])
        near = 1e-5 if model.dtype == torch.float32 else 0.05
        for values, own, scale in zip((k, v), found, scales, strict=True):
            off = near * values.std()
            low, high = (scale * rounded((values + way * off).float(), scale).double() for way in (-1, 1))
            assert ((low <= own) & (own <= high)).all()
        return found

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        weights, spec = self.weights, self.spec.feed_forward
        if isinstance(spec, UngatedSpec):
            up = self.project(x, weights.gate_up, weights.gate_up_bias, LLAMA[5:6])
            inner = xielu(up, weights.xielu) if weights.xielu is not None else UNGATED[spec.activation](up)
        else:
            gate, up = self.project(x, weights.gate_up, weights.gate_up_bias, LLAMA[4:6]).chunk(2, dim=-1)
            inner = GATED[spec.activation](self.model.kind.gate_factor * gate) * up
        return self.project(inner, weights.down, weights.down_bias, LLAMA[6:]) * self.model.kind.part_factor


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


GATED: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: torch.nn.functional.silu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU_SQUARED: lambda x: x.relu().square(),
    Activation.GELU: torch.nn.functional.gelu,
}
UNGATED: dict[UngatedActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    UngatedActivation.GELU_TANH: _gelu_tanh,
    UngatedActivation.GELU: torch.nn.functional.gelu,
    UngatedActivation.RELU: lambda x: x.relu(),
    UngatedActivation.RELU_SQUARED: lambda x: x.relu().square(),
}


def xielu(x: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """As its paper has it, in float64."""
    above, below, beta, eps = parameters.double()
    above, below = torch.nn.functional.softplus(above), beta + torch.nn.functional.softplus(below)
    return torch.where(x > 0, above * x * x, (torch.expm1(x.minimum(eps)) - x) * below) + beta * x


def rotated(rope: RopeConfig, x: torch.Tensor) -> torch.Tensor:
    """Heads `[heads, tokens, head_dim]`, pair by pair of the leading `rope.dim` elements."""
    half = rope.dim // 2
    angles = torch.outer(torch.arange(x.shape[1]), rope.theta ** (-2.0 * torch.arange(half) / rope.dim)).double()
    cos, sin = rope.attention_factor * angles.cos(), rope.attention_factor * angles.sin()
    out = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        out[..., a] = x[..., a] * cos[:, i] - x[..., b] * sin[:, i]
        out[..., b] = x[..., b] * cos[:, i] + x[..., a] * sin[:, i]
    return out


def shares(model: Model, ranks: int, positions: int) -> list[native_model.NativeModel]:
    """Each rank's shard of a model, with pages of its own."""
    kind, whole = model.kind, model.native(positions)
    every_head = kind.head_norm in (HeadNorm.ALL, HeadNorm.OWN)
    inputs = [each.outputs for each in kind.table().layers[0] if each.product == "qkv"]
    ups = (kind.ffn,) * (1 + kind.is_gated)

    def of(rank: int, *sections: torch.Tensor | None) -> torch.Tensor | None:
        """The rank's share of each of the sections, one after the other."""
        parts = [part.chunk(ranks)[rank] for part in sections if part is not None]
        return torch.cat(parts) if parts else None

    def cut(tensor: torch.Tensor | None, *lengths: int) -> tuple[torch.Tensor | None, ...]:
        return (None,) if tensor is None else tensor.split(lengths)

    found = []
    for rank in range(ranks):
        packed = (
            replace(
                layer,
                qkv=of(rank, *cut(layer.qkv, *inputs)),
                qkv_bias=of(rank, *cut(layer.qkv_bias, *inputs)),
                gate_up=of(rank, *cut(layer.gate_up, *ups)),
                gate_up_bias=of(rank, *cut(layer.gate_up_bias, *ups)),
                q_norm=of(rank, layer.q_norm) if every_head else layer.q_norm,
                k_norm=of(rank, layer.k_norm) if every_head else layer.k_norm,
                sinks=of(rank, layer.sinks),
                slopes=of(rank, layer.slopes),
                o=layer.o.chunk(ranks, dim=1)[rank].contiguous(),
                o_bias=None if rank else layer.o_bias,
                down=layer.down.chunk(ranks, dim=1)[rank].contiguous(),
                down_bias=None if rank else layer.down_bias,
            ).packed()
            for layer in model.weights
        )
        specs = [layer.share(ranks) for layer in model.specs]
        first, end = (VOCAB * each // ranks for each in (rank, rank + 1))
        arena = torch.full((model.pages, model.layout.page_elems // ranks), math.nan, dtype=model.dtype)
        found.append(
            replace(
                whole,
                **model.program(specs, kind.table(ranks), list(packed), positions, has_ranks=True),
                vocab=end - first,
                lm_head=native_model.pack(model.head[first:end]),
                head_bias=None if model.head_bias is None else model.head_bias[first:end].contiguous(),
                arena=arena,
            )
        )
    return found
