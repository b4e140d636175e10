"""Tiny random models whose images stand on axes of time, height and width: Qwen2-VL and later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from ...tiny_tokenizer import save_tokenizer

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)

FAMILIES = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_5": "Qwen3_5",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5_moe": "Qwen3_5Moe",
}
"""Beginnings of classes' names, by `model_type`."""

_PROCESSORS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
"""Processors of others than Qwen3VL."""

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
}
SIZE = {"shortest_edge": 16 * 16, "longest_edge": 48 * 40}
"""Pixels of an image: patches of four by four, of which four are a row, make 4 to 30 rows."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "text": {"target_modules": r".*language_model.*\.(q_proj|v_proj|down_proj)"},
    "tower": {"target_modules": r".*visual.*\.(qkv|proj|fc1|linear_fc1|gate_proj|mlp\.0|mlp\.2)"},
    "dora": {"target_modules": r".*visual.*qkv|.*language_model.*v_proj", "use_dora": True},
    "copied": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["merger"]},
}
"""Those whose names of modules are the families' own."""


def save_model(family: str, path: Path) -> None:
    """Write a model without adapters."""
    import transformers

    save_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(path / "tokenizer.json"))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
    name, own = FAMILIES[family], {"patch_size": 4, "size": SIZE}
    images = transformers.Qwen2VLImageProcessor(**own)
    videos = transformers.Qwen2VLVideoProcessor(**own)
    kind = getattr(transformers, f"{_PROCESSORS.get(family, 'Qwen3VL')}Processor")
    kind(images, wrapped, video_processor=videos, chat_template=TEMPLATE).save_pretrained(path)
    ids = {mark: wrapped.convert_tokens_to_ids(mark) for mark in MARKS}
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXTS[family], "vocab_size": -(-len(wrapped) // 8) * 8},
        vision_config=TOWERS[family],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for title, parameter in model.named_parameters():
            if "norm" in title and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif "visual" in title:
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
