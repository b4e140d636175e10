"""Falcon 7B to 180B: attention and a feed-forward part without a gate side by side, and LayerNorm.

q, k and v are one projection: of the larger models, it has a group's queries, then its key and value, group by group.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import Norms
from . import bloom, gpt_2, reading, rotary
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
    bias = fields.boolean("bias")
    attention = rotary.attention(fields.with_values({"num_key_value_heads": kv_heads}), bias=bias)
    norms, names = _norms(fields, is_new=is_new)
    feed_forward = reading.ungated(fields, "activation", default=UngatedActivation.GELU, bias=bias)
    norm, by_unit = reading.layer_norm(fields, "layer_norm_epsilon"), (_QKV,) if is_new or not one else ()
    tensors = replace(_NAMES, names={**_NAMES.names, **names}, by_unit=by_unit)
    return reading.decoder(fields, attention, feed_forward, norm, norms=norms, tensors=tensors)


def _norms(fields: ConfigJson, *, is_new: bool) -> tuple[Norms, dict[str, str]]:
    """Where a layer has norms, and their names."""
    if not is_new:
        return (Norms.PARALLEL if fields.boolean("parallel_attn") else Norms.BEFORE), {}
    count = fields.optional("num_ln_in_parallel_attn") or 2
    if count > 2:
        raise fields.refuse("num_ln_in_parallel_attn", "1 or 2 is needed")
    if count == 1:
        return Norms.PARALLEL, {}
    return Norms.PARALLEL_TWO_NORMS, {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


_NAMES = replace(bloom.BLOOM.tensors, embedding_norm="", by_unit=())

FALCON = Family(
    "Falcon",
    ("FalconForCausalLM",),
    _read,
    Defaults("FalconConfig", takes=TOKENS),
    _NAMES,
    notes="without ALiBi (Falcon-RW)",
    nulls=("num_kv_heads", "num_ln_in_parallel_attn", "ffn_hidden_size"),
)
