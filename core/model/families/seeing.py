"""Models that see, whose text part is any of some families: LLaVA, InternVL, SmolVLM, Kimi K2.5 and others.

The `model_type` of the text part says which family it is.

Tests: tests/core/test_text_parts.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from ...requests.blocks import Blocks
from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import NULLS, Family
from ..specs.tensor_names import BESIDE_VISION, LLAMA_TENSORS, TensorNames
from ..specs.vision import PROJECTED, SEES, VisionSpec
from . import (
    cohere,
    deepseek,
    exaone,
    gemma,
    gemma_2,
    gemma_3,
    glm,
    glm_moe,
    gpt_oss,
    granite,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    qwen2_moe,
    qwen3_5,
    qwen3_moe,
    smollm3,
)

#: Values of `model_type` of text parts.
TEXTS = {
    "llama": llama.LLAMA,
    "mistral": mistral.MISTRAL_PART,
    "ministral": mistral.MINISTRAL,
    "ministral3": mistral.MINISTRAL_3,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen2_moe": qwen2_moe.QWEN2_MOE,
    "qwen3_moe": qwen3_moe.QWEN3_MOE,
    "qwen3_5_text": qwen3_5.QWEN3_5,
    "gemma": gemma.GEMMA,
    "gemma2": gemma_2.GEMMA_2,
    "gemma3_text": gemma_3.GEMMA_3_TEXT,
    "granite": granite.GRANITE,
    "granite4_vision_text": granite.GRANITE,
    "phi3": phi.PHI_3,
    "smollm3": smollm3.SMOLLM3,
    "olmo2": olmo.OLMO_2,
    "olmo3": olmo.OLMO_3,
    "cohere": cohere.COHERE,
    "cohere2": cohere.COHERE_2,
    "exaone4": exaone.EXAONE_4,
    "gpt_oss": gpt_oss.GPT_OSS,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "kimi_k2": deepseek.DEEPSEEK_V3,
    "glm4v_text": glm.GLM_4_1V,
    "glm4v_moe_text": glm_moe.GLM_4_5V,
}

#: Prefixes of the text part's tensors, and of the vision tensors, which are left out.
_TENSORS = replace(
    BESIDE_VISION,
    prefixes=(*BESIDE_VISION.prefixes, "model.text_model."),
    left_out=(
        *BESIDE_VISION.left_out,
        *(
            f"{outer}{part}"
            for outer in ("", "model.")
            for part in (
                "image_newline",
                "layerwise_projectors.",
                "spatial_projectors.",
                "vision_model.",
                "vision_encoder.",
                "vision_projection.",
                "connector.",
                "mm_projector.",
                "mlp1.",
                "visual.",
                "aligner.",
                "generation_",
                "high_res_vision_",
                "image_tower.",
                "merger.",
                "projector.",
                "video_tower.",
                "visual_embeddings_table.",
                "vqmodel.",
            )
        ),
    ),
)


class Around(NamedTuple):
    """Names that a checkpoint has, besides those of most models that see: see `TensorNames`."""

    prefixes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    older: Mapping[str, str] = MappingProxyType({})


PLAIN = Around()


def reader(
    default: str,
    left_out: tuple[str, ...] = (),
    *,
    texts: Mapping[str, Family] = MappingProxyType(TEXTS),
    around: Around = PLAIN,
    scaled: bool = False,
    capped: bool = False,
    own_head: bool = False,
) -> Callable[[ConfigJson], ModelConfig]:
    """default: the type of a text part that names none. left_out: fields of it that say how images are seen. texts: by
    their types. around: further names. scaled: logits are scaled and capped as the text part says; in transformers,
    most of these models do neither, even if their text part does so alone. capped: they are capped alone. own_head:
    embeddings can't be tied to it.
    """

    def read(fields: ConfigJson) -> ModelConfig:
        name = fields.raw.get("model_type") or default
        if not isinstance(name, str) or (family := texts.get(name)) is None:
            raise fields.refuse("model_type", f"not supported as a text part; supported: {', '.join(texts)}")
        fields = fields.with_defaults(family.defaults)
        if own_head and fields.boolean("tie_word_embeddings"):
            raise fields.refuse("tie_word_embeddings", "not supported with this architecture; only false is")
        for each in left_out:
            fields = fields.without(each)
        model = family.read(fields.with_nulls(NULLS | {*family.nulls}))
        tensors = _beside_vision(family.tensors if model.tensors is LLAMA_TENSORS else model.tensors, around)
        model = replace(model, tensors=tensors)
        softcap = model.logits_softcap if capped else None
        return model if scaled else replace(model, logits_scale=1.0, logits_softcap=softcap)

    return read


def _read_granite_4(fields: ConfigJson) -> ModelConfig:
    """Rows of images are added to embeddings that have been scaled."""
    return replace(reader("granite4_vision_text", scaled=True)(fields), scales_image_rows=False)


def _beside_vision(own: TensorNames, around: Around) -> TensorNames:
    """The names of a text model's tensors where it is a part, its draft layers among those that are left out."""
    prefixes = (*around.prefixes, *_TENSORS.prefixes)
    unread = {match[0] for each in own.left_out if (match := re.search(r"\blayers\.\d+\.$", each))}
    left_out = (f"{prefix}{each}" for each in sorted(unread) for prefix in prefixes)
    left_out = (*around.left_out, *_TENSORS.left_out, *own.left_out, *left_out)
    return replace(
        own,
        prefixes=prefixes,
        heads=(*around.heads, *_TENSORS.heads),
        left_out=left_out,
        older={**own.older, **around.older},
    )


def _family(
    title: str,
    *architectures: str,
    text: str,
    tied: bool = False,
    notes: str = "",
    vision: VisionSpec | None = None,
) -> Family:
    """text: see `reader`. tied: whether embeddings are, where no field says so."""
    defaults = {"tie_word_embeddings": tied}
    title = title if vision else f"{title} (text)"
    notes = notes or (SEES if vision else "text only")
    return Family(title, architectures, reader(text), defaults, _TENSORS, notes=notes, vision=vision)


LLAVA = _family(
    "LLaVA and Pixtral", "LlavaForConditionalGeneration", text="llama", vision=replace(PROJECTED, token=32000)
)
LLAVA_NEXT = _family(
    "LLaVA-NeXT and Granite Vision 3",
    "LlavaNextForConditionalGeneration",
    text="llama",
    vision=replace(PROJECTED, token=32000, parameters=("image_newline",)),
)
GRANITE_4_VISION = replace(
    _family(
        "Granite 4 Vision",
        "Granite4VisionForConditionalGeneration",
        text="granite4_vision_text",
        vision=VisionSpec(
            ("vision_tower", "layerwise_projectors", "spatial_projectors"),
            ("pixel_values", "image_sizes"),
            copied=("out_linear",),
            token=32000,
            parameters=("image_newline",),
            unused=("vision_tower.head",),
            has_layers=True,
        ),
    ),
    read=_read_granite_4,
)
LLAVA_NEXT_VIDEO = _family("LLaVA-NeXT-Video", "LlavaNextVideoForConditionalGeneration", text="llama")
LLAVA_ONEVISION = _family(
    "LLaVA-OneVision",
    "LlavaOnevisionForConditionalGeneration",
    text="qwen2",
    notes="text and one image; no video",
    vision=replace(PROJECTED, token=151646, parameters=("image_newline",), most_images=1),
)
INTERNVL = _family(
    "InternVL 3 and 3.5",
    "InternVLForConditionalGeneration",
    text="qwen2",
    tied=True,
    vision=replace(PROJECTED, token=151667),
)
INTERNVL_CHAT = replace(
    _family("InternVL 2.5 to 3.5, as first published", "InternVLChatModel", text="qwen2"), text_part="llm_config"
)
IDEFICS = _family(
    "Idefics 3 and SmolVLM",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    text="llama",
    vision=VisionSpec(
        ("vision_model", "connector"),
        ("pixel_values", "pixel_attention_mask"),
        copied=("modality_projection",),
        token=128257,
    ),
)
AYA = _family(
    "Aya Vision and Command A Vision",
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    text="cohere2",
    tied=True,
    vision=replace(PROJECTED, token=255036),
)
KIMI_K2_5 = _family(
    "Kimi K2.5",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    text="deepseek_v3",
    tied=True,
    notes=deepseek.DEEPSEEK_V3.notes,
)
GLM_4_6V = _family("GLM-4.6V", "Glm46VForConditionalGeneration", text="glm4v_text", notes=SEES, vision=glm.VISION)
LIGHTON_OCR = _family(
    "LightOnOCR",
    "LightOnOcrForConditionalGeneration",
    text="qwen3",
    tied=True,
    vision=VisionSpec(
        ("vision_encoder", "vision_projection"),
        ("pixel_values", "image_sizes"),
        copied=("linear_1", "linear_2", "patch_merger"),
        token=151655,
        least_rows=2,
    ),
)
VIP_LLAVA = _family(
    "ViP-LLaVA", "VipLlavaForConditionalGeneration", text="llama", vision=replace(PROJECTED, token=32000)
)
VIDEO_LLAVA = _family("Video-LLaVA", "VideoLlavaForConditionalGeneration", text="llama")
VIDEO_LLAMA_3 = _family("VideoLLaMA 3", "VideoLlama3ForConditionalGeneration", text="qwen2")
IDEFICS_2 = _family(
    "Idefics 2",
    "Idefics2ForConditionalGeneration",
    text="mistral",
    vision=VisionSpec(
        ("vision_model", "connector"),
        ("pixel_values", "pixel_attention_mask"),
        copied=("modality_projection", "perceiver_resampler"),
        token=32001,
    ),
)
OVIS_2 = _family(
    "Ovis 2",
    "Ovis2ForConditionalGeneration",
    text="qwen2",
    tied=True,
    vision=VisionSpec(
        ("vision_tower", "visual_embeddings_table"),
        ("pixel_values",),
        token=151665,
        marks=(151666, 151667, 151668, 151669, 151670),
    ),
)
GOT_OCR_2 = _family(
    "GOT-OCR 2",
    "GotOcr2ForConditionalGeneration",
    text="qwen2",
    tied=True,
    vision=replace(PROJECTED, copied=(), token=151859),
)
QIANFAN_OCR = _family(
    "Qianfan-OCR", "QianfanOCRForConditionalGeneration", text="qwen3", vision=replace(PROJECTED, token=151667)
)
DEEPSEEK_VL = _family(
    "DeepSeek-VL",
    "DeepseekVLForConditionalGeneration",
    text="llama",
    tied=True,
    vision=VisionSpec(
        ("vision_model", "aligner"),
        ("pixel_values",),
        copied=("linear1", "linear2"),
        unused=("vision_model.head",),
        token=100015,
    ),
)
DEEPSEEK_VL_HYBRID = _family(
    "DeepSeek-VL with two towers", "DeepseekVLHybridForConditionalGeneration", text="llama", tied=True
)
JANUS = _family(
    "Janus and Janus-Pro",
    "JanusForConditionalGeneration",
    text="llama",
    tied=True,
    notes="text and images; it makes no images",
    vision=VisionSpec(("vision_model", "aligner"), ("pixel_values",), token=100581),
)
PALIGEMMA = replace(
    _family(
        "PaliGemma 1 and 2",
        "PaliGemmaForConditionalGeneration",
        text="gemma",
        tied=True,
        vision=replace(PROJECTED, arguments=("pixel_values",), copied=("linear",), token=256000, blocks=Blocks.PROMPT),
    ),
    read=reader("gemma", ("use_bidirectional_attention",), capped=True),
)
MINICPM_V = _family(
    "MiniCPM-V 4.6",
    "MiniCPMV4_6ForConditionalGeneration",
    text="qwen3_5_text",
    vision=VisionSpec(("vision_tower", "merger"), ("pixel_values", "target_sizes"), copied=("vit_merger",)),
)
