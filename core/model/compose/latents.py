"""Attention over latents (MLA), with an indexer or without: functions with which layers write it. See `LatentSpec`.

Tests: tests/core/model/program/test_golden.py, tests/core/layers/test_latents.py, tests/core/layers/test_indexer.py
"""

from __future__ import annotations

from typing import NamedTuple

from ..program.op import CHOSEN, Read, View
from ..program.ops.gates import TakeGates
from ..program.ops.indexers import Choose, Index
from ..program.ops.latents import LatentAttend, Latents
from ..program.ops.norm import Norm
from ..specs.attention import AttentionSpec, LatentSpec, OutputGate
from ..specs.indexer import IndexerSpec
from ..specs.norms import NormSpec
from ..weights.slot import Keep, SlotTensor
from .attention import gated, project
from .build import Build, Proj, Value

_BESIDE_SINKS = "has sinks beside it, so that a bias of keys would change how much goes to them"


class Inputs(NamedTuple):
    """Parts of what `latent_in` gives."""

    queries: View
    """Queries, or their latents."""

    kept: View | None
    """Latents of keys and values, and the key of all heads; None: they are another layer's."""

    gates: View
    """Separate gates."""

    key: View
    """An indexer's key."""

    factors: View
    """Weights of an indexer's heads."""


def latent_in(b: Build, a: AttentionSpec, n: Value) -> Value:
    """What queries are made of, or their latents; latents of keys and values; separate gates; an indexer's."""
    latent = latent_of(a)
    if latent.q_rank:
        own = [Proj("self_attn.q_a_proj", latent.q_rank, 1, a.qkv_bias, form=latent.form)]
    else:
        own = [Proj("self_attn.q_proj", a.num_heads * a.query_dim, a.num_heads, form=latent.form)]
    if not a.shares_kv:
        width = latent.kv_rank + latent.rotated_dim
        own.append(Proj("self_attn.kv_a_proj_with_mqa", width, 1, a.qkv_bias, form=latent.form))
    if gate := latent.input_gate(a.output_gate):
        own.append(Proj("self_attn.g_proj", a.num_heads * gate, a.num_heads, form=latent.form))
    if (index := a.indexer) is not None:
        at = "self_attn.indexer"
        own += [Proj(f"{at}.wk", index.key_dim), Proj(f"{at}.weights_proj", index.heads)]
    return b.linear("qkv", n, "in", *own)


def latent_of(a: AttentionSpec) -> LatentSpec:
    """What attention over latents has of them."""
    assert a.latent is not None, "attention is over latents"
    return a.latent


def parts_of(a: AttentionSpec, x: Value) -> Inputs:
    """The parts of what `latent_in` gave."""
    latent, index = latent_of(a), a.indexer
    behind = 0 if index is None else -index.key_dim - index.heads
    end = behind - a.num_heads * latent.input_gate(a.output_gate)
    begin = end - (0 if a.shares_kv else latent.kv_rank + latent.rotated_dim)
    kept = None if a.shares_kv else View(x, begin, end or None)
    heads = 0 if index is None else index.heads
    return Inputs(
        View(x, 0, begin or None), kept, View(x, end, behind or None), View(x, behind, -heads), View(x, -heads)
    )


def latent_out(b: Build, a: AttentionSpec, x: Value, rows: Value) -> Value:
    """What attention gives, which ranks must sum, of what `latent_in` gave. rows: the layer's normalised input."""
    own = parts_of(a, x)
    return attended(b, a, latent_queries(b, a, own, rows), own.kept, take_gates(b, a, own.gates))


def latent_queries(b: Build, a: AttentionSpec, own: Inputs, rows: Value, bias_factor: float = 1.0) -> Read:
    """Queries; an indexer's are made beside them, of their latents.

    rows: the layer's normalised input. bias_factor: see `Projection`.
    """
    latent, index = latent_of(a), a.indexer
    if not latent.q_rank:
        return own.queries
    low = normed_latent(b, latent, own.queries)
    if index is None:
        return queries_of(b, a, low, bias_factor=bias_factor)
    both = queries_of(b, a, low, Proj("self_attn.indexer.wq_b", index.query_size))
    put_index(b, a, index, View(both, -index.query_size), own, rows)
    return View(both, 0, -index.query_size)


def normed_latent(b: Build, latent: LatentSpec, x: Read) -> Value:
    """The normalised latents of queries."""
    factor = None if latent.q_factor == 1.0 else latent.q_factor
    b.vector("q_norm", "self_attn.q_norm.weight", latent.q_rank, factor=factor)
    return b.put(Norm(x, "ql", "q_norm", NormSpec(latent.eps)), latent.q_rank)


def queries_of(
    b: Build, a: AttentionSpec, low: Value, *further: Proj, gate: int = 0, bias_factor: float = 1.0
) -> Value:
    """Queries of their latents, and what is further. gate: elements of gates behind each head's query."""
    latent = latent_of(a)
    width = a.num_heads * (a.query_dim + gate)
    own = Proj("self_attn.q_b_proj", width, a.num_heads, form=latent.form, bias_factor=bias_factor)
    return b.linear("q_up", low, "qh", own, *further)


def put_index(b: Build, a: AttentionSpec, index: IndexerSpec, queries: Read, own: Inputs, rows: Value) -> None:
    """Write an indexer's keys. queries: its own. rows: the layer's normalised input."""
    at = "self_attn.indexer"
    ends = (SlotTensor(f"{at}.k_norm.{end}", (index.key_dim,)) for end in ("weight", "bias"))
    b.weight("index_norm", *ends, keep=Keep.NORM)
    iq, iw = Value("iq", index.heads, index.key_dim), Value("iw", index.heads)
    pooled = (None, None)
    if index.pool:
        b.weight("index_gates", SlotTensor(f"{at}.index_kpool_compress_gate", (index.key_dim, b.hidden)))
        biases = SlotTensor(f"{at}.index_kpool_compress_ape", (index.pool, index.key_dim))
        b.weight("index_biases", biases, keep=Keep.FLOAT32)
        pooled = (rows, "index_gates")
    b.put_all(Index(queries, own.key, own.factors, iq, iw, a, index, "index_norm", *pooled), iq, iw)


def take_gates(b: Build, a: AttentionSpec, gates: View) -> Value | None:
    """Separate gates, one for each element of heads' outputs; None: there are none."""
    if a.output_gate not in (OutputGate.PER_ELEMENT, OutputGate.PER_HEAD):
        return None
    return b.put(TakeGates(gates, "gates", a.num_heads, latent_of(a).value_dim), a.gate_size)


def attended(b: Build, a: AttentionSpec, queries: Read, kept: Read | None, gates: Value | None) -> Value:
    """What attention gives, which ranks must sum. kept: latents of keys and values, and the key of all heads."""
    latent, index, rows = latent_of(a), a.indexer, ((a.num_heads, a.num_heads),)
    if kept is not None:
        factor = None if latent.kv_factor == 1.0 else latent.kv_factor
        b.vector("k_norm", "self_attn.k_norm.weight", latent.kv_rank, factor=factor)
    q = b.put(Latents(queries, kept, "q", a, latent), a.num_heads, a.query_dim)
    width, why_no_bias = a.num_heads * (latent.key_dim + latent.value_dim), _BESIDE_SINKS if a.sinks else ""
    heads = Proj("self_attn.kv_b_proj", width, a.num_heads, form=latent.form, why_no_bias=why_no_bias)
    b.product("kv_up", latent.kv_rank, heads, keep=Keep.DENSE)
    if index is not None:
        assert a.top_k is not None, "an indexer chooses so many tokens"
        chosen = b.lasting(CHOSEN, a.top_k, kind="index")
        b.put(Choose("iq", "iw", chosen, a, "index_biases" if index.pool else None))
    if a.sinks:
        b.weight("sinks", SlotTensor("self_attn.sinks", (a.num_heads,), rows), keep=Keep.FLOAT32)
    chosen, sinks = None if a.top_k is None else CHOSEN, "sinks" if a.sinks else None
    found = b.put(LatentAttend(q, "a", a, latent, chosen=chosen, sinks=sinks), a.num_heads, a.attended_dim)
    return project(b, a, gated(b, a, found, gates), latent.form)
