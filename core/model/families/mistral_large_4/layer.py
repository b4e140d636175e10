"""Mistral Large 4: latent attention with log-n scaling of its queries and its indexer's.

Tests: tests/core/test_text_parts.py, tests/core/model/program/test_golden.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...compose.build import Build, Proj, Value, width_of
from ...compose.decoder_layer import DecoderLayer
from ...compose.latents import attended, latent_of, normed_latent, parts_of, put_index, queries_of, take_gates
from ...program.op import Read
from ...specs.attention import AttentionSpec
from ...specs.indexer import IndexerSpec
from ...specs.norms import NormKind, NormSpec
from ...weights.slot import SlotTensor
from .ops import LogScaleHeads

_INDEX = "self_attn.indexer"


@dataclass(frozen=True)
class MistralLarge4Layer(DecoderLayer):
    """Queries of position p are multiplied by `scale · log(p + 1) + bias`, learned numbers of each head (scalable
    softmax, arXiv 2501.19399). The indexer's queries are made of the layer's input, by a norm of their own.
    """

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        latent, own, index = latent_of(a), parts_of(a, x), a.indexer
        ih = None if index is None else self._index_queries(b, index, n)
        queries = queries_of(b, a, normed_latent(b, latent, own.queries)) if latent.q_rank else own.queries
        if index is not None and ih is not None:
            put_index(b, a, index, _log_scaled(b, ih, "ih", index.heads, "index_log_scaling", _INDEX), own, n)
        heads = ((a.num_heads, a.num_heads),)
        queries = _log_scaled(b, queries, "qh", a.num_heads, "log_scaling", "self_attn", heads)
        return attended(b, a, queries, own.kept, take_gates(b, a, own.gates))

    def _index_queries(self, b: Build, index: IndexerSpec, n: Value) -> Value:
        norm = NormSpec(index.eps, NormKind.BIASED_LAYER, wide=True)
        n = b.norm("index_input_norm", n, "ni", norm, f"{_INDEX}.q_input_norm")
        return b.linear("index_up", n, "ih", Proj(f"{_INDEX}.wq_b", index.query_size))


def _log_scaled(
    b: Build, x: Read, out: str, heads: int, slot: str, path: str, rows: tuple[tuple[int, int], ...] = ()
) -> Value:
    """Heads of x times `scale · log(position + 1) + bias`, learned numbers of each."""
    b.weight(slot, *(SlotTensor(f"{path}.softmax_scaling.{each}", (heads,), rows) for each in ("scale", "bias")))
    return b.put(LogScaleHeads(x, out, heads, slot), width_of(x))
