"""A layer's products in one step, and the residual stream that they read and add to.

Tests: tests/core/paths, tests/core/model/test_groups.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from ...memory.pages.projections import Group
from ...ops import float8_rows
from ...ops.elementwise import (
    add_layer_norm,
    add_rms_norm,
    gelu_and_mul,
    layer_norm,
    rms_norm,
    silu_and_mul,
    write_latents,
    xielu,
)
from ...ops.latents import LatentHeads
from ...ops.narrow_weights import NarrowWeight
from ...ops.packed_gemm import packed_linear
from ...ops.ranks import Collectives
from ...ops.rotation import KvSlots, NewLatents, Rotation
from ...ops.sparse_gates import sparse_gates
from .batch import GemmBackend, GemmBackends
from .experts import activated, activated_alone, mix_experts
from .layer_weights import LayerWeights
from .layers import (
    PARALLEL,
    Activation,
    Experts,
    GatedSpec,
    LatentSpec,
    LayerSpec,
    MixerBeside,
    NormSpec,
    UngatedActivation,
    UngatedSpec,
)
from .nvtx_spans import span
from .recurrent import RecurrentSpec
from .rounding_weight import RoundingWeight
from .step_lora import ATTN_O, BESIDE_IN, BESIDE_OUT, DOWN, GATE_UP, INPUT_GATE, INPUT_PROJECTION, QKV, StepLora

if TYPE_CHECKING:
    from ...ops.sgmv_triton import Shrunk

#: Index of the logits' GEMM in a step's backends.
HEAD = 4

#: Spans of the groups of projections, with the base weights and with adapters.
_SPANS = {
    QKV: ("attn.qkv", "lora.qkv"),
    ATTN_O: ("attn.o", "lora.o"),
    GATE_UP: ("mlp.gate_up", "lora.gate_up"),
    DOWN: ("mlp.down", "lora.down"),
}


class Residual:
    """The residual stream. rows: `[tokens, hidden]`. added: `[tokens, hidden]`, which the next norm adds to them."""

    __slots__ = ("added", "norm", "rows")

    def __init__(self, rows: torch.Tensor, norm: NormSpec, added: torch.Tensor | None = None) -> None:
        self.rows, self.norm, self.added = rows, norm, added

    def __getitem__(self, tokens: torch.Tensor) -> Residual:
        """Of some tokens, a copy."""
        return Residual(self.rows[tokens], self.norm, None if self.added is None else self.added[tokens])

    def normed(self, weight: torch.Tensor | None) -> torch.Tensor:
        """The norm of the rows, to which `added` is added in place; without a weight the rows themselves."""
        added, self.added = self.added, None
        if weight is None:
            return self.rows if added is None else self.rows.add_(added)
        if added is None:
            return normed(self.rows, weight, self.norm)
        if self.norm.biased:
            return normed(self.rows.add_(added), weight, self.norm)
        return (add_layer_norm if self.norm.centered else add_rms_norm)(added, self.rows, weight, self.norm.eps)


def normed(x: torch.Tensor, weight: torch.Tensor, norm: NormSpec) -> torch.Tensor:
    """x: `[tokens, hidden]`."""
    if norm.biased:
        return layer_norm(x, weight[0], norm.eps, weight[1])
    return (layer_norm if norm.centered else rms_norm)(x, weight, norm.eps)


class Layer:
    """A layer's products in one step.

    With norms BEFORE:

        x += o(mixer(qkv(x)))
        x += down(gate_up(x))

    qkv and gate_up read the residual stream `x` through a norm; the outputs of o and down are added to it. In a layer
    with experts they take the place of gate_up and down. A layer may have one of the two parts alone.
    """

    __slots__ = ("_backends", "_index", "_lora", "_ranks", "_spec", "_weights")

    def __init__(
        self,
        weights: LayerWeights,
        spec: LayerSpec,
        index: int,
        backends: GemmBackends,
        lora: StepLora | None = None,
        ranks: Collectives | None = None,
    ) -> None:
        """lora: None when no row uses an adapter. ranks: have shares of the inputs of o, and of all downs, each."""
        self._weights, self._spec, self._index = weights, spec, index
        self._backends, self._lora, self._ranks = backends, lora, ranks

    def begin(self, x: Residual) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the mixer's input `[tokens, in]`, see `qkv`, and for a layer with a second mixer, that one's input, or
        None. If the feed-forward part runs in parallel with the mixer, its output is added to x here.
        """
        weights, second = self._weights, self._spec.mixer_beside
        rows = x.normed(weights.attention_norm)
        beside = None if second is None else self._beside_in(second, rows)
        own = rows if second is None or second.attention_in == 1.0 else rows * second.attention_in
        qkv = self._with_gates(self._gemm(QKV, own, weights.qkv, weights.qkv_bias))
        if self._spec.norms not in PARALLEL:
            return qkv, beside
        rows = rows if weights.mlp_norm is None else x.normed(weights.mlp_norm)
        x.rows.add_(self._output(self._feed_forward(rows), x.norm, weights.mlp_out_norm))
        return qkv, beside

    def _with_gates(self, inputs: torch.Tensor) -> torch.Tensor:
        """The mixer's input, with decays and gates in place of their latents: see `RecurrentSpec.input_parts`."""
        weights, spec = self._weights, self._spec.mixer
        if not isinstance(spec, RecurrentSpec) or spec.input_parts is None:
            return inputs
        assert weights.decay_up is not None, "the weights are of the spec"
        assert weights.output_gate_up is not None, "the weights are of the spec"
        first, gates, further, decays = inputs.split(spec.input_parts, 1)
        gates = self._added(
            Group.OUTPUT_GATE_UP, gates.contiguous(), weights.output_gate_up, weights.output_gate_up_bias
        )
        decays = self._added(Group.DECAY_UP, decays.contiguous(), weights.decay_up, weights.decay_up_bias)
        return torch.cat((first, gates, further, decays), 1)

    def finish(
        self,
        x: Residual,
        attended: torch.Tensor | None,
        inputs: torch.Tensor | None = None,
        beside: torch.Tensor | None = None,
    ) -> None:
        """Compute the part after the mixer, whose output `[tokens, out]` is given; None: the layer has none. inputs:
        `[tokens, size]`: the layer's further input, where there is one. beside: `[tokens, out]`: the second mixer's
        output, where there is one.
        """
        weights = self._weights
        if attended is not None:
            x.added = self._output(self.o(attended, beside), x.norm, weights.attention_out_norm)
        if self._spec.feed_forward is not None and self._spec.norms not in PARALLEL:
            with span("mlp"):
                rows = x.normed(weights.mlp_norm)
                y = self._feed_forward(rows) if self._spec.beside is None else self._side_by_side(rows, x)
                x.added = self._output(y, x.norm, weights.mlp_out_norm)
        if inputs is not None:
            x.added = self._of_inputs(x.normed(None), inputs, x.norm)
        if weights.scalar is not None:
            x.normed(None).mul_(weights.scalar)

    def _feed_forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: `[tokens, hidden]`, normed."""
        has_experts = isinstance(self._spec.feed_forward, Experts)
        return self._mixed(rows) if has_experts else self.down(self._gate_up(rows))

    def _beside_in(self, second: MixerBeside, rows: torch.Tensor) -> torch.Tensor:
        """The input of the mixer beside attention. rows: `[tokens, hidden]`, normed."""
        weights = self._weights
        assert weights.beside_in is not None, "the weights are of the spec"
        rows = rows if second.in_factor == 1.0 else rows * second.in_factor
        y = self._added(BESIDE_IN, rows, weights.beside_in, weights.beside_in_bias)
        return y if weights.beside_factors is None else y * weights.beside_factors

    def _beside_out(self, second: MixerBeside, mixed: torch.Tensor) -> torch.Tensor:
        """What the mixer beside attention adds to its output. mixed: `[tokens, out]`."""
        weights = self._weights
        assert weights.beside_out is not None, "the weights are of the spec"
        y = self._added(BESIDE_OUT, mixed, weights.beside_out, weights.beside_out_bias)
        return y if second.out_factor == 1.0 else y * second.out_factor

    def _side_by_side(self, rows: torch.Tensor, x: Residual) -> torch.Tensor:
        """The sum of the gated part and of the mixture of experts, which read the same residual stream (Gemma 4)."""
        weights, norm = self._weights, x.norm
        y = self._output(self._feed_forward(rows), norm, weights.dense_out_norm)
        own, routed = (x.normed(each) for each in (weights.experts_norm, weights.router_norm))
        return y + self._output(self._mixed(own, routed), norm, weights.experts_out_norm)

    def _of_inputs(self, rows: torch.Tensor, inputs: torch.Tensor, norm: NormSpec) -> torch.Tensor:
        """What a further input adds to the residual stream; see `LayerInputSpec`."""
        weights, spec = self._weights, self._spec.dense
        assert weights.input_gate is not None, "the weights are of the spec"
        assert weights.input_projection is not None, "the weights are of the spec"
        assert isinstance(spec, GatedSpec), "a layer with inputs has a gated part"
        gate = self._added(INPUT_GATE, rows, weights.input_gate)
        gated = activated(torch.cat((gate, inputs), 1), spec.activation)
        return self._output(self._added(INPUT_PROJECTION, gated, weights.input_projection), norm, weights.input_norm)

    def _added(
        self, group: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A product of the library with what adapters add."""
        y = multiply(GemmBackend.LIBRARY, x, weight, bias)
        if self._lora is not None:
            self._lora.add(group, y, x, self._index)
        return y

    def _mixed(self, rows: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's mixture of experts. routed: see `mix_experts`."""
        experts, spec = self._weights.experts, self._spec.experts
        assert experts is not None, "the weights are of the spec"
        assert spec is not None, "the weights are of the spec"
        lora = None if self._lora is None else self._lora.mixture(self._index)
        y = self._summed(mix_experts(rows, experts, spec, lora, routed))
        return y if spec.factor == 1.0 else y * spec.factor

    def qkv(self, x: Residual) -> torch.Tensor:
        """The mixer's input: attention's `[tokens, q + 2·kv]`, a recurrent mixer's `[tokens, in]`, or latents of
        queries and of keys.
        """
        weights = self._weights
        return self._gemm(QKV, x.normed(weights.attention_norm), weights.qkv, weights.qkv_bias)

    def o(self, attended: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        """attended: `[tokens, out]` of the mixer. beside: of the one beside it, which is added."""
        y = self._gemm(ATTN_O, attended, self._weights.o, self._weights.o_bias)
        if beside is not None and (second := self._spec.mixer_beside) is not None:
            y = y if second.attention_out == 1.0 else y * second.attention_out
            y = y + self._beside_out(second, beside)
        return self._summed(y)

    def latents(
        self,
        inputs: torch.Tensor,
        spec: LatentSpec,
        rotation: Rotation | None,
        slots: KvSlots,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queries `[tokens, heads, key + rotated]`, rotated, in `out` if that is given; the latents are written.
        inputs: `begin`'s.
        """
        weights, size = self._weights, spec.kv_rank + spec.rotated_dim
        q, kept = inputs.split((inputs.shape[1] - size, size), 1)
        if weights.q_up is not None and weights.q_norm is not None:
            rows = rms_norm(q, weights.q_norm, spec.eps)
            q = self._added(Group.QUERY_UP, rows, weights.q_up, weights.q_up_bias)
        new = NewLatents(kept, spec.kv_rank, weights.k_norm, spec.eps)
        return write_latents(q.unflatten(1, (-1, spec.key_dim + spec.rotated_dim)), new, rotation, slots, out)

    def latent_heads(self, spec: LatentSpec) -> LatentHeads:
        """The ways between heads and latents."""
        kv_up, lora = self._weights.kv_up, None if self._lora is None else self._lora.absorbed(self._index)
        assert kv_up is not None, "the weights are of the spec"
        num_heads = len(kv_up) // (spec.key_dim + spec.value_dim)
        return LatentHeads(kv_up, num_heads, spec.key_dim, spec.rotated_dim, lora, self._weights.kv_up_bias)

    def gate_up(self, x: Residual) -> torch.Tensor:
        """`activation(gate) · up`, without a gate `activation(up)`: `[tokens, ffn]`."""
        return self._gate_up(x.normed(self._weights.mlp_norm))

    def _gate_up(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        spec = self._spec.feed_forward
        assert spec is not None, "the layer has the part"
        if isinstance(spec, UngatedSpec):
            up = self._gemm(GATE_UP, rows, weights.gate_up, weights.gate_up_bias)
            return _activated(up, spec.activation, weights.xielu)
        if isinstance(spec, GatedSpec) and (spec.gate_factor != 1.0 or spec.sparsity):
            gate_up = self._gemm(GATE_UP, rows, weights.gate_up, weights.gate_up_bias)
            if spec.gate_factor != 1.0:
                gate_up[:, : gate_up.shape[1] // 2].mul_(spec.gate_factor)
            if spec.sparsity:
                gate_up = sparse_gates(gate_up, spec.sparsity, self._ranks)
            return activated(gate_up, spec.activation)
        if spec.activation is Activation.SILU:
            return self._gemm(GATE_UP, rows, weights.gate_up, weights.gate_up_bias, gate=True)
        return gelu_and_mul(self._gemm(GATE_UP, rows, weights.gate_up, weights.gate_up_bias))

    def down(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: `[tokens, ffn]`."""
        spec = self._spec.feed_forward
        y = self._summed(self._gemm(DOWN, hidden, self._weights.down, self._weights.down_bias))
        return y * spec.factor if isinstance(spec, GatedSpec) and spec.factor != 1.0 else y

    def _summed(self, y: torch.Tensor) -> torch.Tensor:
        """All ranks' shares of a product, added up."""
        return y if self._ranks is None else self._ranks.add_up(y)

    def _output(self, y: torch.Tensor, norm: NormSpec, weight: torch.Tensor | None) -> torch.Tensor:
        """A part's addition to the residual stream, from its last product."""
        y = y if weight is None else normed(y, weight, norm)
        factor = self._spec.residual_multiplier
        return y if factor == 1.0 else y * factor

    def _gemm(
        self, group: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: bool = False
    ) -> torch.Tensor:
        """The product with what adapters add, gated or not; in one launch but for shrink where the way has that."""
        backend, lora, shrunk = self._backends[group], self._lora, None
        base_name, lora_name = _SPANS[group]
        if lora is not None:
            lora.offload(group, x, self._index)
            if backend is GemmBackend.EXPANDED:
                with span(lora_name):
                    shrunk = lora.shrink(group, x, self._index)
        is_added = lora is None or shrunk is not None
        with span(base_name):
            y = multiply(backend, x, weight, bias, gate=gate and is_added, shrunk=shrunk)
        if lora is None or shrunk is not None:
            return y
        with span(lora_name):
            lora.add(group, y, x, self._index)
        return silu_and_mul(y) if gate else y


def _activated(up: torch.Tensor, activation: UngatedActivation, parameters: torch.Tensor | None) -> torch.Tensor:
    """up: `[tokens, ffn]`. parameters: of xIELU."""
    if parameters is not None:
        return xielu(up, parameters)
    return activated_alone(up, activation)


def multiply(
    backend: GemmBackend,
    x: torch.Tensor,
    weight: torch.Tensor | NarrowWeight | RoundingWeight,
    bias: torch.Tensor | None = None,
    *,
    gate: bool = False,
    shrunk: Shrunk | None = None,
) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`; a narrow one is widened in memory for the
    library, and x is rounded for one that says so. gate: `silu(gate) · up` of the halves of that, the
    same bits as one after the other of the same way. shrunk: of adapters that are expanded in the product's launch.
    """
    if isinstance(weight, RoundingWeight):
        x, weight = weight.inputs(x), weight.weight
    if isinstance(weight, NarrowWeight) and weight.rounds_inputs:
        if backend is GemmBackend.LIBRARY:
            y = float8_rows.multiply(x, weight, bias)
            return silu_and_mul(y) if gate else y
        x = float8_rows.rounded(x)
    if backend is GemmBackend.LIBRARY:
        weight = weight.dense() if isinstance(weight, NarrowWeight) else weight
        y = (packed_linear if weight.is_mkldnn else linear)(x, weight, bias)
        return silu_and_mul(y) if gate else y
    from ...ops import small_gemm_triton  # needs triton

    return small_gemm_triton.multiply(x, weight, bias, silu=gate, shrunk=shrunk)
