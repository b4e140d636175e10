"""Qwen3.5 and 3.6, and Qwen3-Next: layers of Gated DeltaNet, and every fourth layer attention with an output
gate.

Qwen3.5-MoE has a mixture of experts in every layer, and an expert that every token goes to. So has Qwen3-Next, whose
projections of Gated DeltaNet are two, with rows by head of keys.

Tests: tests/core/layers/test_hybrids.py, tests/core/test_families.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm, OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Experts, GatedSpec, Routing
from ..specs.recurrent import GatedDeltaSpec
from ..specs.tensor_names import TensorNames
from ..specs.vision import SEES
from . import qwen, reading, rotary
from .defaults import Defaults

_LINEAR = "linear_attention"


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, _attention(fields, adjust=_AXES), reading.gated(fields))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    shared = fields.integer("shared_expert_intermediate_size")
    routing = Routing(1, renormalised=True)
    experts = reading.experts(fields, routing, shared=shared, shared_gate=True)
    return _model(fields, _attention(fields, adjust=_AXES), experts)


def _read_next(fields: ConfigJson) -> ModelConfig:
    shared = fields.integer("shared_expert_intermediate_size")
    routing = Routing(1, renormalised=fields.boolean("norm_topk_prob"))
    experts = reading.experts(fields, routing, shared=shared, shared_gate=True)
    has_experts = reading.sparse_layers(fields)
    return _model(fields, _attention(fields), experts, has_experts=has_experts, tensors=_NEXT_NAMES)


def _model(
    fields: ConfigJson, attention: AttentionSpec, feed_forward: GatedSpec | Experts, **options: Any
) -> ModelConfig:
    """options: of `reading.decoder`."""
    norm = reading.rms_norm(fields, one_plus=True)
    mixers = {reading.FULL: attention, _LINEAR: delta(fields, norm.eps)}
    types = reading.layer_types(fields, fields.integer("full_attention_interval", 4), other=_LINEAR)
    return reading.decoder(fields, [mixers[kind] for kind in types], feed_forward, norm, **options)


def _attention(fields: ConfigJson, **options: Any) -> AttentionSpec:
    return rotary.attention(fields, head_norm=HeadNorm.EACH, output_gate=OutputGate.BESIDE_QUERIES, **options)


_AXES = partial(rotary.in_turns, default=(11, 11, 10))


def delta(fields: ConfigJson, eps: float) -> GatedDeltaSpec:
    """The mixer of layers of Gated DeltaNet. eps: of its norm."""
    reading.check_silu(fields, "Gated DeltaNet")
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


_NAMES = TensorNames(prefixes=("model.language_model.", "model."), left_out=("visual.", "model.visual.", "mtp."))
QWEN3_5 = Family(
    "Qwen3.5 and 3.6 (dense)",
    ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    _read,
    Defaults("Qwen3_5TextConfig"),
    _NAMES,
    notes=f"{SEES}; draft layers (`mtp`) are left out",
    vision=replace(qwen.VISION, token=248056),
)
QWEN3_5_MOE = Family(
    "Qwen3.5-MoE",
    ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    _read_experts,
    Defaults("Qwen3_5MoeTextConfig"),
    _NAMES,
    notes=f"{SEES}; draft layers (`mtp`) are left out",
    vision=replace(qwen.VISION, token=248056),
)
_FUSED = {
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
_NEXT_NAMES = TensorNames(fused=_FUSED, by_unit=tuple(_FUSED), left_out=("mtp.",))
QWEN3_NEXT = Family(
    "Qwen3-Next",
    ("Qwen3NextForCausalLM",),
    _read_next,
    Defaults("Qwen3NextConfig", takes=("intermediate_size",)),
    notes="draft layers (`mtp`) are left out",
)
