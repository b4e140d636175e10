"""Qwen3.5 and 3.6 (dense, text): layers of Gated DeltaNet, and every fourth layer attention with an output gate."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, GatedDeltaSpec, HeadNorm, LayerSpec
from ..tensor_names import TensorNames
from . import reading

_LINEAR = "linear_attention"


def _read(fields: ConfigJson) -> ModelConfig:
    feed_forward, norm = reading.gated(fields), reading.rms_norm(fields, one_plus=True)
    if feed_forward.activation != "silu":
        raise fields.refuse("hidden_act", "Gated DeltaNet is supported with silu alone")
    mixers = {reading.FULL: _attention(fields), _LINEAR: _delta(fields, norm.eps)}
    layers = [LayerSpec(mixers[kind], feed_forward) for kind in _layer_types(fields)]
    return reading.dense(fields, layers, norm)


def _layer_types(fields: ConfigJson) -> list[str]:
    interval = fields.integer("full_attention_interval", 4)
    return reading.layer_types(fields, interval, other=_LINEAR)


def _attention(fields: ConfigJson) -> AttentionSpec:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    return AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=reading.rope(fields, heads.head_dim),
        head_norm=HeadNorm.EACH,
        qkv_bias=bias,
        o_bias=bias,
        output_gate=True,
    )


def _delta(fields: ConfigJson, eps: float) -> GatedDeltaSpec:
    k_heads, v_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if v_heads % k_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads, {k_heads}, is needed")
    return GatedDeltaSpec(
        k_heads,
        v_heads,
        k_dim=fields.integer("linear_key_head_dim"),
        v_dim=fields.integer("linear_value_head_dim"),
        eps=eps,
        conv_size=fields.integer("linear_conv_kernel_dim", least=2),
    )


_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN3_5 = Family(
    "Qwen3.5 and 3.6 (dense, text)",
    ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    _read,
    _DEFAULTS,
    TensorNames(prefixes=("model.language_model.", "model."), left_out=("visual.", "model.visual.", "mtp.")),
    notes="text only; draft layers (`mtp`) are left out",
)
