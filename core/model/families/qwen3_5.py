"""Qwen3.5 and 3.6 (text): layers of Gated DeltaNet, and every fourth layer attention with an output gate.

Qwen3.5-MoE has a mixture of experts in every layer, and an expert that every token goes to.
"""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, Experts, GatedSpec, HeadNorm, LayerSpec, Routing
from ..recurrent import GatedDeltaSpec
from ..tensor_names import TensorNames
from . import reading

_LINEAR = "linear_attention"


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, reading.gated(fields))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    shared = fields.integer("shared_expert_intermediate_size")
    routing = Routing(1, renormalised=True)
    return _model(fields, reading.experts(fields, routing, shared_size=shared, shared_gate=True))


def _model(fields: ConfigJson, feed_forward: GatedSpec | Experts) -> ModelConfig:
    norm = reading.rms_norm(fields, one_plus=True)
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
_NAMES = TensorNames(prefixes=("model.language_model.", "model."), left_out=("visual.", "model.visual.", "mtp."))
QWEN3_5 = Family(
    "Qwen3.5 and 3.6 (dense, text)",
    ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    _read,
    _DEFAULTS,
    _NAMES,
    notes="text only; draft layers (`mtp`) are left out",
)
QWEN3_5_MOE = Family(
    "Qwen3.5-MoE (text)",
    ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    _read_experts,
    {
        **_DEFAULTS,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    _NAMES,
    notes=f"text only; draft layers (`mtp`) are left out; {reading.EXPERTS_NOTE}",
)
