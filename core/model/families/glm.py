"""GLM-4: half of each head rotates, by neighbouring pairs; GLM-4-0414 and GLM-4.1V also norm the output of each
part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.tensor_names import FUSED_GATE_UP, LLAMA_NORMS, TEXT_AND_IMAGES, TensorNames
from ..specs.vision import SEES
from . import qwen, reading, rotary
from .defaults import Defaults


def _reader(norms: Norms, *, qkv_bias: bool = False, has_images: bool = False) -> Callable[[ConfigJson], ModelConfig]:
    """qkv_bias: without a field that says so. has_images: positions have axes."""

    def read(fields: ConfigJson) -> ModelConfig:
        own = {"qkv_bias": qkv_bias or fields.boolean("attention_bias")}
        attention = rotary.attention(fields, interleaved=True, adjust=AXES if has_images else None, **own)
        return reading.decoder(fields, attention, reading.gated(fields), norms=norms)

    return read


def _read_ocr(fields: ConfigJson) -> ModelConfig:
    """Without the draft layer after the last."""
    model = _reader(Norms.AROUND, has_images=True)(
        fields.without("attention_bias").with_defaults({"attention_bias": False})
    )
    drafts = (f"{prefix}layers.{len(model.layers)}." for prefix in GLM_4_1V.tensors.prefixes)
    tensors = replace(GLM_4_1V.tensors, left_out=(*GLM_4_1V.tensors.left_out, *drafts))
    return replace(model, tensors=tensors)


#: Of M-RoPE, where `mrope_section` is missing.
AXES = partial(rotary.in_sections, default=(8, 12, 12))
OUT_NORMS = {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}

GLM = Family(
    "GLM-4",
    ("GlmForCausalLM",),
    _reader(Norms.BEFORE),
    Defaults("GlmConfig"),
    TensorNames(fused=FUSED_GATE_UP),
    nulls=("num_key_value_heads",),
)
_NAMES_4 = TensorNames(names={**LLAMA_NORMS, **OUT_NORMS}, fused=FUSED_GATE_UP)
GLM_4 = Family(
    "GLM-4-0414",
    ("Glm4ForCausalLM",),
    _reader(Norms.AROUND),
    Defaults("Glm4Config"),
    _NAMES_4,
)
VISION = replace(qwen.VISION, token=151343)
GLM_4_1V = Family(
    "GLM-4.1V",
    ("Glm4vForConditionalGeneration",),
    _reader(Norms.AROUND, qkv_bias=True, has_images=True),
    Defaults("Glm4vTextConfig", {"partial_rotary_factor": 1.0}),
    replace(TEXT_AND_IMAGES, names=_NAMES_4.names, fused=FUSED_GATE_UP),
    notes=SEES,
    nulls=("num_key_value_heads",),
    vision=VISION,
)
GLM_OCR = Family(
    "GLM-OCR",
    ("GlmOcrForConditionalGeneration",),
    _read_ocr,
    Defaults("GlmOcrTextConfig", {"partial_rotary_factor": 1.0}),
    GLM_4_1V.tensors,
    notes=f"{SEES}; the draft layer after the last is left out",
    vision=replace(VISION, token=59280),
)
