"""Lara Mini: layers of Gated DeltaNet between layers of attention with a window, or without window and rope; experts in
every layer, beside one that every token goes to.

Tests: tests/core/test_experts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Activation, Routing
from ..specs.tensor_names import TensorNames
from . import qwen3_5, reading, rotary

_LINEAR = "linear_attention"


def _read(fields: ConfigJson) -> ModelConfig:
    count, norm = fields.integer("num_hidden_layers"), reading.rms_norm(fields, wide=True)
    types = fields.texts("layer_types") or [_PATTERN[at % len(_PATTERN)] for at in range(count)]
    if unknown := sorted({*types} - {reading.FULL, reading.SLIDING, _LINEAR}):
        supported = f"{reading.FULL}, {reading.SLIDING}, {_LINEAR}"
        raise fields.refuse("layer_types", f"{unknown[0]} is not supported; supported: {supported}")
    if len(types) != count:
        raise fields.refuse("layer_types", f"{len(types)} types for num_hidden_layers, {count}")
    experts = reading.experts(
        fields,
        Routing(1, renormalised=fields.boolean("norm_topk_prob")),
        shared_size=fields.integer("shared_expert_intermediate_size"),
    )
    if experts.activation is not Activation.SILU:
        raise fields.refuse("hidden_act", "Gated DeltaNet is supported with silu alone")
    attention = rotary.attention(fields, head_norm=HeadNorm.EACH)
    mixers = {
        reading.FULL: replace(attention, rope=None),
        reading.SLIDING: replace(attention, window=reading.checked_window(fields, types)),
        _LINEAR: qwen3_5.delta(fields, norm.eps),
    }
    return reading.dense(fields, [DecoderLayer(mixers[kind], experts) for kind in types], norm)


_PATTERN = (_LINEAR, reading.SLIDING, _LINEAR, reading.FULL, reading.SLIDING)
_FUSED = "linear_attn.in_proj"
_PARTS = tuple(f"{_FUSED}_{each}" for each in ("qkv", "z", "b", "a"))

LARA_MINI = Family(
    "Lara Mini",
    ("LaraMiniForCausalLM",),
    _read,
    {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "eos_token_id": 151643,
    },
    TensorNames(fused={_FUSED: _PARTS}, apart=(_FUSED,), older={"linear_attn.norm": "linear_attn.out_norm"}),
)
