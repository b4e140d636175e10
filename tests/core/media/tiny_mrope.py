"""Tiny random models whose images stand on axes of time, height and width: Qwen2-VL and later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer

from ...tiny_tokenizer import save_tokenizer

_QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|im_end|>")
_GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "<|im_end|>")
_BAIDU = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|video_pad|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ 'IMAGE' }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)

FAMILIES = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_5": "Qwen3_5",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "glm4v": "Glm4v",
    "glm46v": "Glm46V",
    "glm_ocr": "GlmOcr",
    "glm4v_moe": "Glm4vMoe",
    "paddleocr_vl": "PaddleOCRVL",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
}
"""Beginnings of classes' names, by `model_type`."""

ERNIE = "ernie4_5_vl_moe"
ON_TORCH = (ERNIE,)
"""Families whose steps PyTorch's operators compute where images are served: the native decoder refuses them."""


class Processors(NamedTuple):
    """Beginnings of the names of classes of a family's processors; and its marks around images, and of one."""

    whole: str
    images: str
    videos: str
    marks: tuple[str, ...]


_LIKE_QWEN3 = Processors("Qwen3VL", "Qwen2VL", "Qwen2VL", _QWEN)
_LIKE_GLM = Processors("Glm46V", "Glm46V", "Glm46V", _GLM)
PROCESSORS = dict.fromkeys(FAMILIES, _LIKE_QWEN3) | {
    "qwen2_vl": _LIKE_QWEN3._replace(whole="Qwen2VL"),
    "qwen2_5_vl": _LIKE_QWEN3._replace(whole="Qwen2_5_VL"),
    "glm46v": _LIKE_GLM,
    **dict.fromkeys(("glm4v", "glm_ocr", "glm4v_moe"), Processors("Glm4v", "Glm4v", "Glm4v", _GLM)),
    "paddleocr_vl": Processors("PaddleOCRVL", "PaddleOCRVL", "", _BAIDU),
    ERNIE: Processors("Ernie4_5_VLMoe", "Ernie4_5_VLMoe", "Ernie4_5_VLMoe", _BAIDU),
}

_SECTIONS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": _SECTIONS,
}
_TOWER = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "depth": 2, "num_heads": 2}

_LATER = {**_TEXT, "head_dim": 16, "num_hidden_layers": 4}
_HYBRID = {
    **_LATER,
    "head_dim": 32,
    "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5},
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
_GLM_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_GLM_TOWER = {**_TOWER, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "image_size": 32}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
_LATER_TOWER = {
    **_TOWER,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}

TEXTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _TEXT,
    "qwen2_5_vl": _TEXT,
    "qwen3_vl": _LATER,
    "qwen3_5": _HYBRID,
    "qwen3_vl_moe": {**_LATER, **_EXPERTS, "decoder_sparse_step": 1},
    "qwen3_5_moe": {**_HYBRID, **_EXPERTS},
    "glm4v": _TEXT,
    "glm46v": {**_TEXT, "model_type": "glm4v_text"},
    "glm_ocr": _TEXT,
    "glm4v_moe": {
        **_TEXT,
        **_GLM_EXPERTS,
        "head_dim": 16,
        "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 1.0},
    },
    "paddleocr_vl": {**_TEXT, "head_dim": 16, "tie_word_embeddings": False},
    ERNIE: {
        **_TEXT,
        "num_hidden_layers": 4,
        "moe_intermediate_size": [48, 24],
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]},
        "tie_word_embeddings": False,
    },
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        **_TOWER,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {**_LATER_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 2]},
    "qwen3_5": _LATER_TOWER,
    "qwen3_vl_moe": {**_LATER_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 2]},
    "qwen3_5_moe": _LATER_TOWER,
    **dict.fromkeys(("glm4v", "glm_ocr", "glm4v_moe"), _GLM_TOWER),
    "glm46v": {**_GLM_TOWER, "model_type": "glm4v_vision"},
    "paddleocr_vl": _SIGLIP,
    ERNIE: {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
    },
}
_NAMES = dict.fromkeys(("glm4v", "glm46v", "glm_ocr", "glm4v_moe", ERNIE), "image")
"""Beginnings of the names of tokens around images, where it is not `vision`."""
_ERNIE_TOKENS = {
    **{f"{what}_{at}_token": _BAIDU[place] for what in ("image", "video") for at, place in (("start", 0), ("end", 2))},
    "video_token": _BAIDU[3],
}
SIZE = {"shortest_edge": 16 * 16, "longest_edge": 48 * 40}
"""Pixels of an image: patches of four by four, of which four are a row, make 4 to 30 rows."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "text": {"target_modules": r".*language_model.*\.(q_proj|v_proj|down_proj)"},
    "tower": {"target_modules": r".*visual.*\.(qkv|proj|fc1|linear_fc1|gate_proj|up_proj|mlp\.0|mlp\.2)"},
    "dora": {"target_modules": r".*visual.*qkv|.*language_model.*v_proj", "use_dora": True},
    "copied": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["merger"]},
}
"""Those whose names of modules are the families' own."""


def adapters(family: str) -> dict[str, dict[str, Any]]:
    """Those of a family."""
    if family == ERNIE:
        tower = r".*(vision_tower.*\.(qkv|proj|fc1)|resampler_model\..*(fc2|mlp))"
        dora = r".*vision_tower.*qkv|.*language_model.*v_proj"
        return ADAPTERS | {
            "tower": {"target_modules": tower},
            "dora": {"target_modules": dora, "use_dora": True},
            "copied": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["resampler_model"]},
            "experts": {
                "target_modules": ["q_proj", "down_proj"],
                "target_parameters": ["text_moe.experts.gate_up_proj", "text_moe.experts.down_proj"],
            },
        }
    if family != "paddleocr_vl":
        return ADAPTERS
    tower = r".*(visual.*\.(q_proj|out_proj|fc1|patch_embedding)|projector\.linear_[12])"
    dora = r".*visual.*q_proj|.*language_model.*v_proj"
    return ADAPTERS | {
        "tower": {"target_modules": tower},
        "dora": {"target_modules": dora, "use_dora": True},
        "copied": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["projector"]},
    }


def save_model(family: str, path: Path, text: dict[str, Any] | None = None) -> None:
    """Write a model without adapters. text: further fields of its text part."""
    import transformers

    save_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    processors = PROCESSORS[family]
    begin, image, end, video, _ = processors.marks
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in processors.marks])
    tokenizer.save(str(path / "tokenizer.json"))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
        extra_special_tokens={"image_token": image, **(_ERNIE_TOKENS if family == ERNIE else {})},
    )
    own, parts = {"patch_size": 4, "size": SIZE}, {}
    images = getattr(transformers, f"{processors.images}ImageProcessor")(**own)
    if processors.videos:
        without = {"draw_on_frames": False, "font": ""} if family == ERNIE else {}
        parts["video_processor"] = getattr(transformers, f"{processors.videos}VideoProcessor")(**own, **without)
    template = TEMPLATE.replace("IMAGE", begin + image + end)
    kind = getattr(transformers, f"{processors.whole}Processor")
    kind(images, wrapped, chat_template=template, **parts).save_pretrained(path)
    name, ids = FAMILIES[family], {mark: wrapped.convert_tokens_to_ids(mark) for mark in processors.marks}
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXTS[family], **(text or {}), "vocab_size": -(-len(wrapped) // 8) * 8},
        vision_config=TOWERS[family],
        image_token_id=ids[image],
        video_token_id=ids[video],
        **{f"{_NAMES.get(family, 'vision')}_{at}_token_id": ids[mark] for at, mark in (("start", begin), ("end", end))},
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for title, parameter in model.named_parameters():
            if "norm" in title and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif "e_score_correction" in title:
                parameter.uniform_(-0.1, 0.1)
            elif any(part in title for part in ("visual", "projector", "vision_tower", "resampler")):
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
