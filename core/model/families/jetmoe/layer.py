"""JetMoE: attention whose queries and outputs are those of experts, and biases of what experts add up to.

Tests: tests/core/layers/test_query_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compose.attention import attend, heads, kept_in
from ...compose.build import Build, Proj, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.mixtures import mixture_weights
from ...program.op import View
from ...program.ops.moe import Moe
from ...specs.attention import AttentionSpec
from ...specs.feed_forward import Experts
from ...weights.layer_weights import PartWeights
from ...weights.slot import Keep, SlotTensor
from .ops import AddBias, OutputsOfExperts, QueriesOfExperts, QueryExperts


@dataclass(frozen=True, kw_only=True)
class JetMoeLayer(DecoderLayer):
    """See `QueryExperts`. All experts share keys and values."""

    queries: QueryExperts

    def why_not(self, size: int) -> str | None:
        """See `LayerSpec.why_not`."""
        heads = 0 if self.attention is None else self.attention.num_kv_heads
        return f"num_key_value_heads {heads}, for which experts have queries," if heads % size else None

    def attention_in(self, b: Build, a: AttentionSpec, n: Value) -> Value:
        """See `DecoderLayer.inputs`."""
        router = Proj("self_attn.query_router", self.queries.count)
        return b.linear("qkv", n, "in", *kept_in(a, a.head_dim, a.head_dim), router)

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        spec, at, shape = self.queries, "self_attn.experts", (a.kv_size, b.hidden)
        logits, rows = View(x, -spec.count), ((a.kv_size, a.num_kv_heads),)
        queries = (SlotTensor(f"{at}.{each}.q_proj.weight", shape, rows) for each in range(spec.count))
        outputs = (
            SlotTensor(f"{at}.{each}.o_proj.weight", shape[::-1], columns=a.num_kv_heads) for each in range(spec.count)
        )
        b.part("query_experts", _listed)
        b.weight("query_experts.queries", *queries, keep=Keep.EXPERT, count=spec.count)
        b.weight("query_experts.outputs", *outputs, keep=Keep.EXPERT, count=spec.count)
        q = Value("eq", a.q_size)
        experts, weights = Value("ec", spec.per_token, kind="index"), Value("ew", spec.per_token, kind="wide")
        b.put_all(QueriesOfExperts(n, logits, q, experts, weights, a, spec), q, experts, weights)
        q, _ = heads(b, a, b.concat("in", q, View(x, 0, logits.begin)))
        y = b.put(OutputsOfExperts(attend(b, a, q), experts, weights, "y", a, spec), b.hidden)
        return _biased(b, y, "outputs_bias", at)

    def mixture_part(self, b: Build, spec: Experts, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        mixture_weights(b, spec)
        return b.reduce(_biased(b, b.put(Moe(rows, None, "y", spec), b.hidden), "experts_bias", "mlp"))


def _biased(b: Build, y: Value, slot: str, at: str) -> Value:
    """What experts add up to, with a bias."""
    return b.put(AddBias(y, b.weight(slot, SlotTensor(f"{at}.bias", (b.hidden,)), first_rank=True)), b.hidden)


def _listed(of: PartWeights) -> Any:
    from .matrices import ListedQueries

    return ListedQueries(**of.own)
