"""ERNIE 4.5 (text): Llama that rotates neighbouring pairs; ERNIE-4.5-MoE chooses experts by a softmax with a learned
correction. PaddleOCR-VL rotates halves.

Tests: tests/core/model/specs/test_published_configs.py, tests/core/paths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import CORRECTION, LLAMA_NORMS, TEXT_AND_IMAGES, TensorNames
from ..specs.vision import SEES
from . import qwen, reading, rotary
from .defaults import Defaults


def attention_of(fields: ConfigJson, *, bias: bool, interleaved: bool = True) -> AttentionSpec:
    """The attention of all layers."""
    heads = reading.heads(fields)
    rope = rotary.rope(fields, heads.head_dim, interleaved=interleaved)
    return AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope, qkv_bias=bias, o_bias=bias)


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, attention_of(fields, bias=fields.boolean("use_bias")))


def _read_ocr(fields: ConfigJson) -> ModelConfig:
    attention = attention_of(fields, bias=fields.boolean("use_bias"), interleaved=False)
    assert attention.rope is not None, "all layers rotate"
    return _model(fields, replace(attention, rope=qwen.AXES(fields, attention.rope)))


def _model(fields: ConfigJson, attention: AttentionSpec) -> ModelConfig:
    layer = DecoderLayer(attention, reading.gated(fields, bias=fields.boolean("use_bias")))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    count = fields.integer("num_hidden_layers")
    last = fields.integer("moe_layer_end_index", least=-1)
    first, last = fields.integer("moe_layer_start_index", least=0), count - 1 if last == -1 else last
    interval = fields.integer("moe_layer_interval")
    has_experts = [first <= index <= last and (index + 1) % interval == 0 for index in range(count)]
    return mixture_of(fields, attention_of(fields, bias=False), has_experts, NAMES)


def mixture_of(
    fields: ConfigJson,
    attention: AttentionSpec,
    has_experts: Sequence[bool],
    tensors: TensorNames,
    layer: type[DecoderLayer] = DecoderLayer,
    **options: Any,
) -> ModelConfig:
    """A model of such layers. has_experts: which of them have experts. options: of `reading.experts`."""
    if fields.boolean("use_bias"):
        raise fields.refuse("use_bias", "a shared expert has no biases here; only false is supported")
    if fields.number("moe_norm_min") > _NORM_MIN:
        raise fields.refuse("moe_norm_min", f"weights are divided by their sum, however small; at most {_NORM_MIN}")
    experts = reading.experts(
        fields,
        Routing(1, renormalised=True, corrected=True),
        per_token="num_experts_per_tok" if "num_experts_per_tok" in fields.raw else "moe_k",
        shared_size=reading.number_of(fields, "moe_num_shared_experts") * fields.integer("moe_intermediate_size"),
        **options,
    )
    layers = reading.layers_with_experts(fields, [attention] * len(has_experts), experts, has_experts, layer)
    return reading.dense(fields, layers, reading.rms_norm(fields), tensors=tensors)


#: The least sum of weights that checkpoints name: sums are above it.
_NORM_MIN = 1e-12

_MATRICES = ("gate_proj", "up_proj", "down_proj")
NAMES = TensorNames(
    names={
        **LLAMA_NORMS,
        **{f"mlp.shared_expert.{each}": f"mlp.shared_experts.{each}" for each in _MATRICES},
        CORRECTION: "mlp.moe_statics.e_score_correction_bias",
    },
    wrapped=(CORRECTION,),
    left_out=("model.mtp_",),
)

ERNIE_4_5 = Family(
    "ERNIE 4.5",
    ("Ernie4_5ForCausalLM",),
    _read,
    Defaults("Ernie4_5Config"),
    nulls=("head_dim", "num_key_value_heads", "use_bias"),
)
ERNIE_4_5_MOE = Family(
    "ERNIE-4.5-MoE",
    ("Ernie4_5_MoeForCausalLM",),
    _read_experts,
    Defaults("Ernie4_5_MoeConfig"),
    notes="draft layers (`mtp`) are left out; models with biases are refused",
    nulls=("num_key_value_heads", "use_bias"),
)
PADDLEOCR_VL = Family(
    "PaddleOCR-VL",
    ("PaddleOCRVLForConditionalGeneration",),
    _read_ocr,
    Defaults("PaddleOCRTextConfig"),
    replace(TEXT_AND_IMAGES, left_out=(*TEXT_AND_IMAGES.left_out, "mlp_AR.", "model.projector.")),
    notes=SEES,
    nulls=("head_dim", "num_key_value_heads", "use_bias"),
    vision=replace(
        qwen.VISION,
        token=100295,
        modules=("visual", "projector"),
        copied=(),
        renamed=(("mlp_AR", "projector"),),
    ),
)
