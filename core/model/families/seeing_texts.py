"""Models that see, and are served for text alone: their text parts are families that are served, or nearly.

Tests: tests/core/test_text_parts.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import TensorNames
from . import (
    apertus,
    aria,
    cohere,
    cosmos,
    glm_next,
    granite,
    hunyuan,
    hy_v4,
    hyperclova,
    llama,
    nemotron_h,
    persimmon,
    qwen,
    reading,
    rotary,
    seeing,
)
from .defaults import TOKENS, Defaults
from .inkling import family as inkling
from .seeing import Around


def _read_molmo(fields: ConfigJson) -> ModelConfig:
    """Qwen3, or OLMo 2 with its norms before: the fields say which."""
    kind = fields.text("qk_norm_type")
    if kind not in _QK_NORMS:
        raise fields.refuse("qk_norm_type", f"not supported; supported: {', '.join(_QK_NORMS)}")
    fields = reading.renamed(fields, {"attention_bias": "qkv_bias", "rms_norm_eps": "layer_norm_eps"})
    attention = replace(rotary.attention(fields, head_norm=_QK_NORMS[kind]), o_bias=False)
    count = fields.integer("num_hidden_layers")
    scaled = range(count) if fields.is_missing("rope_scaling_layers") else fields.indices("rope_scaling_layers")
    rope = attention.rope
    plain = attention if rope is None else replace(attention, rope=RopeConfig(rope.dim, rope.theta))
    norms = Norms.AFTER if fields.boolean("norm_after") else Norms.BEFORE
    layers = [DecoderLayer(attention if at in scaled else plain, reading.gated(fields), norms) for at in range(count)]
    model = reading.dense(fields, layers, reading.rms_norm(fields))
    return replace(model, further_embeddings=reading.number_of(fields, "additional_vocab_size"))


_QK_NORMS = {"qwen3": HeadNorm.EACH, "olmo": HeadNorm.ALL}


def _read_mllama(fields: ConfigJson) -> ModelConfig:
    """Llama, with layers between its own that attend to images: without one they are skipped."""
    fields = fields.without("head_dim").without("attention_bias").without("mlp_bias")
    if fields.boolean("tie_word_embeddings"):
        raise fields.refuse("tie_word_embeddings", f"the embeddings have {_OF_IMAGES} rows more than the head")
    model = llama.LLAMA.read(fields)
    skipped = {*fields.indices("cross_attention_layers")} if "cross_attention_layers" in fields.raw else {*_CROSS}
    nothing = DecoderLayer(None, None)
    layers = tuple(nothing if at in skipped else each for at, each in enumerate(model.layers))
    left_out = tuple(f"{prefix}layers.{at}." for at in sorted(skipped) for prefix in ("", "model."))
    tensors = replace(llama.LLAMA.tensors, left_out=left_out)
    return replace(model, layers=layers, further_embeddings=_OF_IMAGES, tensors=tensors)


#: Rows of Llama 3.2 Vision's embeddings behind those of the vocabulary, and its layers that attend to images.
_OF_IMAGES, _CROSS = 8, (3, 8, 13, 18, 23, 28, 33, 38)

LLAMA_3_2_VISION_TEXT = Family(
    "Llama 3.2 Vision (text)",
    ("MllamaForCausalLM",),
    _read_mllama,
    Defaults("MllamaTextConfig", takes=TOKENS),
    nulls=("head_dim", "num_key_value_heads"),
)
#: A layer's norms stand before its parts or behind them: Molmo 2 has the same names for both.
_MOLMO_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_out_norm": "input_layernorm",
    "mlp_out_norm": "post_attention_layernorm",
}
_MOLMO_2_PUBLISHED = TensorNames(
    prefixes=("model.transformer.",),
    norm="ln_f",
    embeddings="wte.embed_tokens",
    layers="blocks",
    names={
        **dict.fromkeys(("attention_norm", "attention_out_norm"), "attn_norm"),
        **dict.fromkeys(("mlp_norm", "mlp_out_norm"), "ff_norm"),
        "self_attn.o_proj": "self_attn.attn_out",
        "mlp.down_proj": "mlp.ff_out",
    },
    fused={
        "self_attn.att_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.ff_proj": ("mlp.up_proj", "mlp.gate_proj"),
    },
)
_MOLMO_2_TEXT = Family(
    "Molmo 2 (text)",
    (),
    _read_molmo,
    Defaults("Molmo2TextConfig"),
    TensorNames(
        names=_MOLMO_NORMS,
        joined={"wte.embed_tokens.weight": ("wte.embedding", "wte.new_embedding")},
        published=(_MOLMO_2_PUBLISHED,),
    ),
    nulls=("rope_scaling_layers",),
)
_TEXTS: Mapping[str, Family] = MappingProxyType(
    {
        **seeing.TEXTS,
        "qwen3_vl_text": qwen.QWEN3_VL,
        "hyperclovax": hyperclova.HYPERCLOVA_X,
        "granite_docling_text": granite.DOCLING_TEXT,
        "emu3_text_model": llama.EMU_3_TEXT,
        "cosmos3_edge_text": cosmos.EDGE_TEXT,
        "hunyuan_vl_text": hunyuan.HUNYUAN_VL_TEXT,
        "hy_v4_vl_text": hy_v4.HY_V4_TEXT,
        "glm5_next_text": glm_next.GLM_5_NEXT_TEXT,
        "inkling_text": inkling.INKLING,
        "aria_text": aria.ARIA_TEXT,
        "molmo2_text": _MOLMO_2_TEXT,
        "apertus1p5_text": apertus.APERTUS_1_5_TEXT,
        "cohere_compass_text": cohere.COMPASS_TEXT,
        "mllama_text_model": LLAMA_3_2_VISION_TEXT,
        "persimmon": persimmon.PERSIMMON,
        "nemotron_h": nemotron_h.NEMOTRON_H,
    }
)


def _family(
    title: str, architecture: str, text: str, around: Around = seeing.PLAIN, *, tied: bool = False, **options: Any
) -> Family:
    """text: the type of the text part. tied: whether embeddings are, where no field says so. options: of `reader`."""
    read = seeing.reader(text, texts=_TEXTS, around=around, **options)
    tensors = replace(seeing.INTERNVL.tensors, left_out=(*around.left_out, *seeing.INTERNVL.tensors.left_out))
    slow = f"; {reading.ON_OPERATORS}" * (reading.ON_OPERATORS in _TEXTS[text].notes)
    notes = f"text only{slow}"
    return Family(f"{title} (text)", (architecture,), read, {"tie_word_embeddings": tied}, tensors, notes=notes)


def _as_first_published(family: Family) -> Callable[[ConfigJson], ModelConfig]:
    """A reader of a text part in `llm_config`, too."""
    return lambda fields: family.read(fields.text_part("llm_config").with_defaults(family.defaults))


FAST_VLM = _family("FastVLM", "FastVlmForConditionalGeneration", "qwen2")
PERCEPTION_LM = _family("Perception LM", "PerceptionLMForConditionalGeneration", "llama")
HYPERCLOVA_X_VISION = _family(
    "HyperCLOVA X Vision 2",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "hyperclovax",
    Around(
        prefixes=("model.language_model.model.",),
        left_out=("model.vision_projector.",),
        heads=("model.language_model.lm_head.weight",),
    ),
    tied=True,
    scaled=True,
)
COSMOS_3 = _family(
    "Cosmos 3",
    "Cosmos3OmniForConditionalGeneration",
    "qwen3_vl_text",
    Around(
        prefixes=("",),
        left_out=("blocks.", "merger.", "patch_embed.", "pos_embed.", "deepstack_merger_list."),
        older={
            **cosmos.TO_PROJECTIONS,
            "self_attn.q_norm": "self_attn.norm_q",
            "self_attn.k_norm": "self_attn.norm_k",
        },
    ),
)
COSMOS_3_EDGE = _family(
    "Cosmos 3 Edge", "Cosmos3EdgeForConditionalGeneration", "cosmos3_edge_text", Around(prefixes=("",)), own_head=True
)
MINICPM_V_4_7 = _family("MiniCPM-V 4.7", "MiniCPMV4_7ForConditionalGeneration", "qwen3_5_text")
MINICPM_OCR = _family("MiniCPM-OCR", "MiniCPMOcrForConditionalGeneration", "qwen3_5_text")
GRANITE_DOCLING = _family(
    "Granite Docling",
    "GraniteDoclingForConditionalGeneration",
    "granite_docling_text",
    Around(left_out=("density_router.", "model.density_router.")),
    tied=True,
    scaled=True,
)
HUNYUAN_VL = _family(
    "HunyuanOCR (Hunyuan-VL)",
    "HunYuanVLForConditionalGeneration",
    "hunyuan_vl_text",
    Around(prefixes=("model.",), left_out=("vit.", "model.vit.")),
    tied=True,
)
HY_V4_VL = _family(
    "Hunyuan 4 VL",
    "HYV4VLForConditionalGeneration",
    "hy_v4_vl_text",
    Around(prefixes=("model.",), left_out=("vit.", "model.vit.")),
)
GLM_5_3_FLASH = _family(
    "GLM-5.3-Flash", "Glm5NextForConditionalGeneration", "glm5_next_text", Around(prefixes=("model.",))
)
INKLING = _family(
    "Inkling",
    "InklingForConditionalGeneration",
    "inkling_text",
    Around(left_out=inkling.TOWERS),
    scaled=True,
)
EMU_3 = _family(
    "Emu 3",
    "Emu3ForConditionalGeneration",
    "emu3_text_model",
    Around(prefixes=("text_model.model.", "text_model."), heads=("text_model.lm_head.weight",)),
)
ARIA = _family("Aria", "AriaForConditionalGeneration", "aria_text")
MOLMO_2 = _family(
    "Molmo 2",
    "Molmo2ForConditionalGeneration",
    "molmo2_text",
    Around(left_out=("model.vision_backbone.",)),
    own_head=True,
)
APERTUS_1_5 = _family(
    "Apertus 1.5",
    "Apertus1p5ForConditionalGeneration",
    "apertus1p5_text",
    Around(left_out=tuple(f"{outer}{part}_tokenizer." for outer in ("", "model.") for part in ("vision", "audio"))),
)
COHERE_COMPASS = _family(
    "Command Compass and North Vision", "CohereCompassForConditionalGeneration", "cohere_compass_text", scaled=True
)
LLAMA_3_2_VISION = _family("Llama 3.2 Vision", "MllamaForConditionalGeneration", "mllama_text_model")
FUYU = _family(
    "Fuyu",
    "FuyuForCausalLM",
    "persimmon",
    Around(left_out=("vision_embed_tokens.", "model.vision_embed_tokens.")),
)
_OMNI = _family(
    "Nemotron Nano Omni",
    "NemotronH_Omni_Reasoning_V3",
    "nemotron_h",
    Around(
        prefixes=("language_model.backbone.",),
        left_out=("vision_final_layernorm.", "audio_tower.", "embed_audio.", "sound_encoder.", "sound_projection."),
    ),
)
NEMOTRON_OMNI = replace(_OMNI, read=_as_first_published(_OMNI))
