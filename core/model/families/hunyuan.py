"""Hunyuan, dense and with experts: norms of heads after they are rotated. Hunyuan 3 has them before, and experts chosen
by sigmoids with a learned correction.

Tests: tests/core/test_families.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing, Scoring
from ..specs.tensor_names import CORRECTION, LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _attention(fields: ConfigJson) -> AttentionSpec:
    heads, bias, rope_fields = reading.heads(fields), fields.boolean("attention_bias"), rotary.rope_fields(fields)
    if fields.boolean("use_cla"):
        raise fields.refuse("use_cla", "attention across layers is not supported; only false is")
    rope = rotary.rope(fields, heads.head_dim)
    if rope.type == "dynamic" and (alpha := reading.optional_number(rope_fields, "alpha")) is not None:
        if (dim := heads.head_dim) == 2:
            raise fields.refuse("head_dim", "alpha needs more than two elements that rotate")
        # as NTK-aware interpolation: the frequencies depend on no length
        rope = replace(rope, type="default", theta=rope.theta * alpha ** (dim / (dim - 2)))
    rotary.check_rotated_norm(fields, rope)
    return AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rope,
        head_norm=HeadNorm.ROTATED,
        qkv_bias=bias,
        o_bias=bias,
    )


def _read(fields: ConfigJson) -> ModelConfig:
    layer = DecoderLayer(_attention(fields), reading.gated(fields))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


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
    experts = reading.experts(fields, routing, size="intermediate_size", per_token="moe_topk", shared_size=size)
    layers = [DecoderLayer(_attention(fields), experts)] * fields.integer("num_hidden_layers")
    return reading.dense(fields, layers, reading.rms_norm(fields))


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
    routing = Routing(
        1,
        Scoring.SIGMOID,
        renormalised=True,
        epsilon=1e-20,
        factor=fields.number("router_scaling_factor"),
        corrected=True,
    )
    shared = reading.number_of(fields, "num_shared_experts") * fields.integer("moe_intermediate_size")
    experts = reading.experts(fields, routing, shared_size=shared)
    layers = reading.layers_with_experts(fields, [attention] * count, experts, reading.mlp_layer_types(fields, 1))
    tensors = replace(_NAMES_3, left_out=(f"model.layers.{count}.",))
    return reading.dense(fields, layers, reading.rms_norm(fields), tensors=tensors)


_MATRICES = ("gate_proj", "up_proj", "down_proj")
_NAMES_3 = TensorNames(
    names={
        **LLAMA_NORMS,
        **{f"mlp.shared_expert.{each}": f"mlp.shared_mlp.{each}" for each in _MATRICES},
        "mlp.gate": "mlp.router.gate",
        CORRECTION: "mlp.expert_bias",
    },
    adapter_names={f"mlp.shared_expert.{each}": f"mlp.shared_experts.{each}" for each in _MATRICES},
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
    TensorNames(
        names={
            **LLAMA_NORMS,
            **_HEAD_NORMS,
            **{f"mlp.shared_expert.{each}": f"mlp.shared_mlp.{each}" for each in _MATRICES},
            "mlp.gate": "mlp.gate.wg",
        }
    ),
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
