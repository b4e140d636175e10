"""A.X K2: DeepSeek-V3.2 with gates, of what norms before its parts give and of attention's output.

Tests: tests/core/layers/test_latent_gates.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...compose.build import Build, Proj, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.latents import attended, latent_of, normed_latent, parts_of, put_index, queries_of
from ...program.ops.gates import TakeGates
from ...program.ops.heads import ResizeHeads
from ...specs.attention import AttentionSpec

_INDEX_QUERIES = "self_attn.indexer.wq_b"

#: Parts by the norm before them.
_PARTS = {"attention_norm": "mixer", "mlp_norm": "mlp"}


@dataclass(frozen=True, kw_only=True)
class AxLayer(DecoderLayer):
    """Outputs n of norms before its parts have gates, `n · sigmoid(up(silu(down(n))))`.

    Queries, and gates of attention's output, are made of `[norm(c_q), c_q]`, where c_q is their latent; an indexer's
    queries of the first alone.
    """

    rank: int
    """Width between the two matrices of gates."""

    gated: tuple[str, ...]
    """The norms that have gates."""

    def normed(self, b: Build, name: str, x: Value) -> Value:
        """See `DecoderLayer.normed`."""
        n = super().normed(b, name, x)
        if name not in self.gated:
            return n
        slot, path = f"{_PARTS[name]}_gates", f"norm_gates.{name}"
        low = b.linear(f"{slot}_down", n, "l", Proj(f"{path}.fc1", self.rank), merges=False)
        low = b.gate(low, low)  # that is silu
        return b.gate(n, b.linear(f"{slot}_up", low, "l", Proj(f"{path}.fc2", b.hidden), merges=False))

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        latent, own, index = latent_of(a), parts_of(a, x), a.indexer
        low = normed_latent(b, latent, own.queries)
        ih = None if index is None else b.linear("index_up", low, "ih", Proj(_INDEX_QUERIES, index.query_size))
        queries = queries_of(b, a, b.concat("ql", low, own.queries), gate=latent.value_dim)
        if index is not None and ih is not None:
            put_index(b, a, index, ih, own, n)
        gates = b.put(TakeGates(queries, "gates", a.num_heads, latent.value_dim), a.gate_size)
        wide = a.query_dim + latent.value_dim
        queries = b.put(ResizeHeads(queries, "qh", 0, wide, a.query_dim), a.num_heads * a.query_dim)
        return attended(b, a, queries, own.kept, gates)
