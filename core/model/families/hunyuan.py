"""Hunyuan, dense and with experts: norms of heads after they are rotated. Hunyuan 3 has them before, and experts chosen
by sigmoids with a learned correction.

Tests: tests/core/test_families.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import CORRECTION, LLAMA_NORMS, SHARED_EXPERTS, TensorNames, gated_names
from . import reading, rotary
from .defaults import Defaults


def _attention(fields: ConfigJson) -> AttentionSpec:
    attention = rotary.attention(fields, head_norm=HeadNorm.ROTATED, adjust=_stretched)
    if fields.boolean("use_cla"):
        raise fields.refuse("use_cla", "attention across layers is not supported; only false is")
    return attention


def _stretched(fields: ConfigJson, rope: RopeConfig) -> RopeConfig:
    alpha = reading.optional_number(rotary.rope_fields(fields), "alpha")
    if rope.type == "dynamic" and alpha is not None:
        if rope.dim == 2:
            raise fields.refuse("head_dim", "alpha needs more than two elements that rotate")
        # as NTK-aware interpolation: the frequencies depend on no length
        rope = replace(rope, type="default", theta=rope.theta * alpha ** (rope.dim / (rope.dim - 2)))
    rotary.check_rotated_norm(fields, rope)
    return rope


def _read(fields: ConfigJson) -> ModelConfig:
    return reading.decoder(fields, _attention(fields), reading.gated(fields))


def _read_vl(fields: ConfigJson) -> ModelConfig:
    """As `_read`; ropes have sections, and older checkpoints name them, and their type, in other words."""
    scaling = rotary.rope_fields(fields)
    kind = rotary.rope_type_of(scaling)
    if scaling.is_missing("mrope_section") and scaling.is_missing("xdrope_section"):
        raise scaling.refuse("mrope_section", "transformers fails without the sections of this family's positions")
    if kind == "xdrope":
        own = {**{name: value for name, value in scaling.raw.items() if name != "type"}, "rope_type": "dynamic"}
        fields = fields.without("rope_scaling").with_values({"rope_parameters": own})
    return _read(fields)


def _read_experts(fields: ConfigJson) -> ModelConfig:
    fields = reading.renamed(fields, {"moe_topk": "num_experts_per_tok", "num_experts": "num_local_experts"})
    numbers = {name: _number_of_all(fields, name) for name in ("num_experts", "moe_topk") if name in fields.raw}
    fields = fields.with_values(numbers)
    size = fields.integer("intermediate_size")
    routing = Routing(1, renormalised=True)
    experts = reading.experts(fields, routing, size="intermediate_size", per_token="moe_topk", shared=size)
    return reading.decoder(fields, _attention(fields), experts)


def _number_of_all(fields: ConfigJson, name: str) -> object:
    """A field that is one number, or a list of the same number for each layer."""
    value = fields.raw[name]
    if not isinstance(value, list) or not value:
        return value
    if len(value) < (count := fields.integer("num_hidden_layers")):
        raise fields.refuse(name, f"{len(value)} numbers for num_hidden_layers, {count}")
    if any(each != value[0] for each in value):
        raise fields.refuse(name, "layers with different numbers of experts are not supported")
    return value[0]


def _read_3(fields: ConfigJson) -> ModelConfig:
    count = fields.integer("num_hidden_layers")
    if fields.boolean("mlp_bias"):
        raise fields.refuse("mlp_bias", "experts have no biases here; only false is supported")
    attention = rotary.attention(fields, head_norm=HeadNorm.EACH)
    routing = reading.sigmoid_routing(fields, "router_scaling_factor", 1e-20)
    experts = reading.experts(fields, routing, shared="num_shared_experts")
    tensors = replace(_NAMES_3, left_out=(f"model.layers.{count}.",))
    return reading.decoder(fields, attention, experts, has_experts=reading.mlp_layer_types(fields, 1), tensors=tensors)


_SHARED = gated_names("mlp.shared_expert", "mlp.shared_mlp")
_NAMES_3 = TensorNames(
    names={
        **LLAMA_NORMS,
        **_SHARED,
        "mlp.gate": "mlp.router.gate",
        CORRECTION: "mlp.expert_bias",
    },
    adapter_names=SHARED_EXPERTS,
)
_HEAD_NORMS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
HUNYUAN = Family(
    "Hunyuan (dense)",
    ("HunYuanDenseV1ForCausalLM",),
    _read,
    Defaults("HunYuanDenseV1Config"),
    TensorNames(names={**LLAMA_NORMS, **_HEAD_NORMS}),
    nulls=("head_dim", "num_key_value_heads"),
)
HUNYUAN_VL_TEXT = replace(
    HUNYUAN,
    title="HunyuanOCR (text)",
    architectures=(),
    read=_read_vl,
    defaults=Defaults("HunYuanVLTextConfig"),
)
HUNYUAN_MOE = Family(
    "Hunyuan-A13B",
    ("HunYuanMoEV1ForCausalLM",),
    _read_experts,
    Defaults("HunYuanMoEV1Config"),
    TensorNames(names={**LLAMA_NORMS, **_HEAD_NORMS, **_SHARED, "mlp.gate": "mlp.gate.wg"}),
    notes="layers with different numbers of experts are refused",
    nulls=("head_dim", "num_key_value_heads"),
)
HUNYUAN_3 = Family(
    "Hunyuan 3",
    ("HYV3ForCausalLM",),
    _read_3,
    Defaults("HYV3Config", takes=("intermediate_size",)),
    notes="the draft layer after the last is left out",
)
