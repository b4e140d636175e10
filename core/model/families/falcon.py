"""Falcon 7B to 180B: attention and a feed-forward part without a gate side by side, and LayerNorm.

q, k and v are one projection: of the larger models, it has a group's queries, then its key and value, group by group.
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import Norms
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import gpt_2, reading, rotary
from .defaults import TOKENS, Defaults

_QKV = "self_attention.query_key_value"


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("alibi"):
        raise fields.refuse("alibi", "ALiBi is not supported; models with rotary embedding are")
    fields = gpt_2.sizes(fields, {"hidden_size": "n_embed"}, "ffn_hidden_size")
    is_new, one = fields.boolean("new_decoder_architecture"), fields.boolean("multi_query")
    count = fields.integer("num_attention_heads")
    kv_heads = (fields.optional("num_kv_heads") or count) if is_new or not one else 1
    if not (is_new or one) and kv_heads != count:
        raise fields.refuse("num_kv_heads", f"without multi_query it must be num_attention_heads, {count}")
    heads = reading.heads(fields.with_values({"num_key_value_heads": kv_heads}))
    bias = fields.boolean("bias")
    rope = rotary.rope(fields, heads.head_dim)
    attention = AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope, qkv_bias=bias, o_bias=bias)
    norms, names = _norms(fields, is_new=is_new)
    feed_forward = reading.ungated(fields, "activation", default=UngatedActivation.GELU, bias=bias)
    layers = [DecoderLayer(attention, feed_forward, norms)] * fields.integer("num_hidden_layers")
    found = reading.dense(fields, layers, reading.layer_norm(fields, "layer_norm_epsilon"))
    by_unit = (_QKV,) if is_new or not one else ()
    return replace(found, tensors=replace(_NAMES, names={**_NAMES.names, **names}, by_unit=by_unit))


def _norms(fields: ConfigJson, *, is_new: bool) -> tuple[Norms, dict[str, str]]:
    """Where a layer has norms, and their names."""
    if not is_new:
        return (Norms.PARALLEL if fields.boolean("parallel_attn") else Norms.BEFORE), {}
    count = fields.optional("num_ln_in_parallel_attn") or 2
    if count > 2:
        raise fields.refuse("num_ln_in_parallel_attn", "1 or 2 is needed")
    return (
        (Norms.PARALLEL_TWO_NORMS, {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"})
        if count == 2
        else (
            Norms.PARALLEL,
            {},
        )
    )


_NAMES = TensorNames(
    prefixes=("transformer.", ""),
    norm="ln_f",
    embeddings="word_embeddings",
    layers="h",
    names={
        **LLAMA_NORMS,
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    fused={_QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
)

FALCON = Family(
    "Falcon",
    ("FalconForCausalLM",),
    _read,
    Defaults("FalconConfig", takes=TOKENS),
    _NAMES,
    notes="without ALiBi (Falcon-RW)",
    nulls=("num_kv_heads", "num_ln_in_parallel_attn", "ffn_hidden_size"),
)
