"""Attention over keys and values: functions with which layers write it.

Tests: tests/core/model/program/test_golden.py, tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from ..program.op import CHOSEN, Read, View
from ..program.ops.attend import Attend
from ..program.ops.heads import Heads
from ..program.ops.indexers import ChooseBlocks, IndexBlocks
from ..program.ops.rows import Clip
from ..specs.attention import AttentionSpec, HeadNorm, OutputGate
from ..specs.indexer import BlockIndexerSpec
from ..weights.slot import Keep, SlotTensor
from .build import Build, Proj, Value


def attention_in(b: Build, a: AttentionSpec, n: Value, *further: Proj) -> Value:
    """The input product: queries, keys and values, then gates with a projection of their own, then what an indexer and
    `further` projections give.
    """
    own = heads_in(a, value=a.value_dim)
    if a.output_gate in (OutputGate.PER_ELEMENT, OutputGate.PER_HEAD):
        size = a.q_size if a.output_gate is OutputGate.PER_ELEMENT else a.num_heads
        own += (Proj("self_attn.g_proj", size, a.num_heads, form=a.form),)
    if a.block_indexer is not None:
        own += a.block_indexer.products
    x = b.linear("qkv", n, "in", *own, *further)
    return x if a.clip is None else b.put(Clip(x, a.clip), x.width)


def heads_in(a: AttentionSpec, key: int | None = None, value: int | None = None) -> tuple[Proj, ...]:
    """Projections of queries, keys and values. key, value: elements of a head's, where pages have more."""
    key = key or a.head_dim
    query = key * (1 + (a.output_gate is OutputGate.BESIDE_QUERIES))
    return (
        Proj("self_attn.q_proj", a.num_heads * query, a.num_heads, a.qkv_bias, form=a.form),
        *kept_in(a, key, value or key),
    )


def kept_in(a: AttentionSpec, key: int, value: int) -> tuple[Proj, ...]:
    """Projections of keys and values, as far as the layer has its own. key, value: elements of a head's."""
    count = 0 if a.shares_kv else 1 if a.keys_are_values else 2
    widths = (("k_proj", key), ("v_proj", value))[:count]
    return tuple(
        Proj(f"self_attn.{name}", a.num_kv_heads * width, a.num_kv_heads, a.qkv_bias, form=a.form)
        for name, width in widths
    )


def attention_out(b: Build, a: AttentionSpec, x: Read, *, relative: str | None = None) -> Value:
    """What attention gives, which ranks must sum, of what `attention_in` gave. relative: see `Attend`."""
    if a.block_indexer is not None:
        return _attention_of_blocks(b, a, a.block_indexer, x)
    q, gates = heads(b, a, x)
    return project(b, a, gated(b, a, attend(b, a, q, relative=relative), gates))


def heads(b: Build, a: AttentionSpec, x: Read) -> tuple[Value, Value | None]:
    """Queries, and gates if there are any; keys and values are written to their pages."""
    _head_norms(b, a)
    q = Value("q", a.num_heads, a.head_dim)
    gates = None if a.output_gate is None else Value("gates", a.gate_size)
    b.put_all(Heads(x, q, gates, a, b.norm_spec), *((q,) if gates is None else (q, gates)))
    return q, gates


def _head_norms(b: Build, a: AttentionSpec) -> None:
    if a.head_norm in (None, HeadNorm.BARE):
        return
    of_all = a.head_norm in (HeadNorm.ALL, HeadNorm.OWN)
    ends = ("weight", "bias") if a.head_norm is HeadNorm.BIASED else ("weight",)
    for name, count in (("q_norm", a.num_heads), ("k_norm", 0 if a.shares_kv else a.num_kv_heads)):
        if count:
            width = count * a.head_dim if of_all else a.head_dim
            rows = ((width, count),) if of_all else ()
            b.weight(name, *(SlotTensor(f"self_attn.{name}.{end}", (width,), rows) for end in ends), keep=Keep.NORM)


def attend(b: Build, a: AttentionSpec, q: Value, *, chosen: str | None = None, relative: str | None = None) -> Value:
    """The outputs of heads. chosen, relative: see `Attend`."""
    rows = ((a.num_heads, a.num_heads),)
    if a.sinks:
        b.weight("sinks", SlotTensor("self_attn.sinks", (a.num_heads,), rows))
    if a.slopes:
        b.weight("slopes", SlotTensor("", (a.num_heads,), rows, made=a.slopes), keep=Keep.FLOAT32)
    return b.put(Attend(q, "a", a, chosen=chosen, relative=relative), a.num_heads, a.attended_dim)


def gated(b: Build, a: AttentionSpec, x: Value, gates: Value | None) -> Value:
    """The outputs of heads, times their gates if there are any."""
    return x if gates is None else b.gate(x, gates, softplus=a.softplus_gates)


def project(b: Build, a: AttentionSpec, x: Value, form: str | None = None) -> Value:
    """The product of the outputs of heads, which ranks must sum. form: see `Proj`; None: that of attention."""
    own = Proj("self_attn.o_proj", b.hidden, a.num_heads, a.o_bias, form=a.form if form is None else form)
    return b.linear("o", x, "y", own, rows=True)


def _attention_of_blocks(b: Build, a: AttentionSpec, index: BlockIndexerSpec, x: Read) -> Value:
    """See `BlockIndexerSpec`."""
    assert isinstance(x, str), "what an indexer reads is at the end of the buffer"
    first, key = -index.query_size - index.key_dim, View(x, -index.key_dim)
    for name in ("q_norm", "k_norm"):
        b.vector(f"index_{name}", f"self_attn.indexer.{name}.weight", index.key_dim)
    iq = Value("iq", index.heads, index.key_dim)
    b.put_all(IndexBlocks(View(x, first, key.begin), key, iq, a, index, b.norm_spec), iq)
    q, gates = heads(b, a, View(x, 0, first, copied=True))
    k_norm = "index_k_norm" if index.scores_means else None
    b.put(ChooseBlocks(iq, CHOSEN, a, index, b.norm_spec, k_norm))
    return project(b, a, gated(b, a, attend(b, a, q, chosen=CHOSEN), gates))
