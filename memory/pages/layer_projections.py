"""The projections of a model itself, and of one shaped like Llama: rows of the table in `projections`.

Pure data, like `layout`. Tests: tests/memory/pages/test_projections.py
"""

from __future__ import annotations

from .projections import Projection, Projections, Role


def attention_projections(
    hidden: int, heads: int, kv_heads: int, head_dim: int, *, form: str = ""
) -> tuple[Projection, ...]:
    """Those of full attention. form: see `Projection`."""
    q, kv = heads * head_dim, kv_heads * head_dim
    return (
        Projection("self_attn.q_proj", "qkv", hidden, q, heads, form=form),
        Projection("self_attn.k_proj", "qkv", hidden, kv, kv_heads, form=form),
        Projection("self_attn.v_proj", "qkv", hidden, kv, kv_heads, form=form),
        Projection("self_attn.o_proj", "o", q, hidden, heads, form=form, is_row_parallel=True),
    )


def gated_projections(hidden: int, size: int) -> tuple[Projection, ...]:
    """Those of a gated feed-forward part."""
    return (
        Projection("mlp.gate_proj", "gate_up", hidden, size, size),
        Projection("mlp.up_proj", "gate_up", hidden, size, size, scales="mlp.down_proj"),
        Projection("mlp.down_proj", "down", size, hidden, size, is_row_parallel=True),
    )


def dense_projections(num_layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> Projections:
    """The table of a model shaped like Llama: every layer has full attention and a gated feed-forward part."""
    layer = attention_projections(hidden, heads, kv_heads, head_dim) + gated_projections(hidden, ffn)
    return Projections((layer,) * num_layers)


def model_projections(vocab: int, hidden: int, head: int, inputs: int = 0) -> tuple[Projection, ...]:
    """The token embeddings and the output projection. head: how many tokens the latter gives logits of. inputs: width
    of the per-layer embeddings.
    """
    own = (Projection("model.per_layer_model_projection", Role.PER_LAYER, hidden, inputs, 1),) if inputs else ()
    return (
        Projection("model.embed_tokens", Role.EMBEDDING, vocab, hidden, 1),
        Projection("lm_head", Role.HEAD, hidden, head, 1),
        Projection("model.embed_tokens_rows", Role.EMBEDDING_ROWS, hidden, 0, 1),
        Projection("lm_head_rows", Role.HEAD_ROWS, hidden, 0, 1),
        *own,
    )
