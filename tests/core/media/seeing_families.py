"""Tiny models that see, a family each."""

from __future__ import annotations

from .seeing import CLIP, PIXTRAL, SIGLIP, TOWER, Seeing

OLD = (("model.language_model.", "language_model.model."), ("model.multi_modal_projector", "multi_modal_projector"))
"""Of models whose text part was a whole one."""
_CLIP_OLD = (*OLD, ("model.vision_tower.", "vision_tower.vision_model."))
_PLAIN_OLD = (*OLD, ("model.vision_tower.", "vision_tower."))

_CROPS = {"size": {"height": 16, "width": 16}, "crop_to_patches": True, "max_patches": 4}
_CLIP_SIZE = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_NEXT_SIZE = {**_CLIP_SIZE, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
_PINPOINTS = [[32, 32], [32, 64], [64, 32], [64, 64]]
_LLAMA = {"model_type": "llama"}
_IDEFICS_SIZE = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
_IDEFICS = {
    "around": (
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ),
    "config": {"scale_factor": 2},
    "projector": "connector",
    "tower_linear": r".*(vision_model.*(q_proj|k_proj|v_proj|fc1|out_proj|patch_embedding)|connector.*proj)",
    "tower_dora": r".*vision_model.*(q_proj|fc2)|.*text_model.*v_proj",
    "text_linear": r".*text_model.*\.(q_proj|v_proj|down_proj)",
}
"""Four rows a tile: 32 x 32 pixels in patches of 8 are 16, of which the connector makes one of four."""
_PATCHES = {"image_size": 32, "patch_size": 8, **TOWER}
_INTERNVL = {"image_size": [16, 16], "patch_size": [4, 4], **TOWER}

_LOCATIONS = (*(f"<loc{i:0>4}>" for i in range(1024)), *(f"<seg{i:0>3}>" for i in range(128)))
_GEMMA_MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_PALIGEMMA = {
    "images": ("Siglip", {"size": {"height": 32, "width": 32}, "image_seq_length": 16}),
    "processor": ("PaliGemma", {}),
    "named": {"image_token": "<image>"},
    "adds": _LOCATIONS,
    "typed": True,
    "config": {"projection_dim": 64, "hidden_size": 64},
    "step": {"max_num_batched_tokens": 160, "max_num_seqs": 4},
    "tower_linear": r".*(vision_tower.*(q_proj|v_proj|fc1|out_proj|patch_embedding)|multi_modal_projector.*linear)",
    "renamed": _CLIP_OLD,
}
_GEMMA_4 = {
    "tower": {
        "model_type": "gemma4_vision",
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "position_embedding_size": 256,
        "use_clipped_linears": True,
        **TOWER,
    },
    "images": ("Gemma4", {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}),
    "processor": ("Gemma4", {"image_seq_length": 70}),
    "videos": ("Gemma4", {}),
    "sound": "Gemma4",
    "mark": "<|image|>",
    "around": ("<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
    "named": {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    "projector": "embed_vision",
    "tower_linear": r".*(vision_tower.*(q_proj|v_proj|up_proj|down_proj)\.linear|vision_tower.*input_proj"
    r"|embed_vision.*projection)",
    "tower_dora": r".*vision_tower.*(q_proj|down_proj)\.linear|.*language_model.*v_proj",
    "seven": r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
}

_OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")

SEEING: dict[str, Seeing] = {
    "gemma3": Seeing(
        "Gemma3",
        {
            "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {**SIGLIP, "vision_use_head": False},
        ("Gemma3", {"size": {"height": 32, "width": 32}}),
        ("Gemma3", {"image_seq_length": 16}),
        mark="<image_soft_token>",
        place="<start_of_image>",
        around=("<start_of_image>", "<end_of_image>"),
        named=_GEMMA_MARKS,
        config={"mm_tokens_per_image": 16},
        matrix="multi_modal_projector.mm_input_projection_weight",
        step={"max_num_batched_tokens": 37, "max_num_seqs": 4},
        renamed=_CLIP_OLD,
    ),
    "gemma4": Seeing(
        "Gemma4",
        {
            "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
            "attention_k_eq_v": True, "num_hidden_layers": 4, "sliding_window": 20, "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "use_bidirectional_attention": "vision",
        },
        step={"max_num_batched_tokens": 97, "max_num_seqs": 4},
        **_GEMMA_4,
    ),
    "gemma4_inputs": Seeing(
        "Gemma4",
        {
            "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4,
            "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 2048,
        },
        excluded=r".*per_layer_model_projection",
        **_GEMMA_4,
    ),
    "paligemma": Seeing("PaliGemma", {"model_type": "gemma", "head_dim": 16}, SIGLIP, **_PALIGEMMA),
    "paligemma2": Seeing(
        "PaliGemma",
        {"model_type": "gemma2", "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
        SIGLIP,
        **_PALIGEMMA,
    ),
    "smolvlm": Seeing(
        "SmolVLM", _LLAMA, _PATCHES, ("SmolVLM", _IDEFICS_SIZE), ("SmolVLM", {"image_seq_len": 4}),
        videos=("SmolVLM", _IDEFICS_SIZE), **_IDEFICS,
    ),
    "idefics3": Seeing(
        "Idefics3", _LLAMA, _PATCHES, ("Idefics3", _IDEFICS_SIZE), ("Idefics3", {"image_seq_len": 4}), **_IDEFICS
    ),
    "mistral3": Seeing(
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": {
            "type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
        }},
        PIXTRAL,
        ("Pixtral", {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}}),
        ("Pixtral", {"patch_size": 8, "spatial_merge_size": 2}),
        mark="[IMG]",
        around=("[IMG_BREAK]", "[IMG_END]"),
        config={"spatial_merge_size": 2},
        tower_linear=r".*(vision_tower.*(q_proj|o_proj|up_proj|patch_conv)|multi_modal_projector.*(linear|merging))",
        tower_dora=r".*vision_tower.*(q_proj|down_proj)|.*language_model.*v_proj",
        refused=("small",),  # it has one row
        renamed=_PLAIN_OLD,
    ),
    "internvl": Seeing(
        "InternVL",
        {"model_type": "qwen2", "use_sliding_window": False},
        {"model_type": "internvl_vision", **_INTERNVL},
        ("GotOcr2", _CROPS),
        ("InternVL", {"image_seq_length": 4}),
        mark="<IMG_CONTEXT>",
        around=("<img>", "</img>", "<video>"),
        named={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        videos=("InternVL", {}),
        tower_linear=r".*(vision_tower.*(q_proj|v_proj|fc1|projection_layer|patch_embeddings.projection)"
        r"|multi_modal_projector.*linear_\d)",
        renamed=_PLAIN_OLD,
    ),
    "llava": Seeing(
        "Llava", _LLAMA, CLIP, ("CLIP", _CLIP_SIZE),
        ("Llava", {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}),
        renamed=_CLIP_OLD,
    ),
    "pixtral": Seeing(
        "Llava",
        {"model_type": "mistral", "sliding_window": None},
        PIXTRAL,
        ("Pixtral", {"size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}}),
        ("Pixtral", {"patch_size": 8}),
        mark="[IMG]",
        around=("[IMG_BREAK]", "[IMG_END]"),
        config={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        refused=("one pixel high",),  # it becomes smaller than a pixel
        tower_linear=r".*(vision_tower.*(q_proj|o_proj|up_proj|patch_conv)|multi_modal_projector.*linear)",
        tower_dora=r".*vision_tower.*(q_proj|down_proj)|.*language_model.*v_proj",
        renamed=_PLAIN_OLD,
    ),
    "llava_next": Seeing(
        "LlavaNext", {"model_type": "mistral", "sliding_window": None}, CLIP, ("LlavaNext", _NEXT_SIZE),
        ("LlavaNext", {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}),
        config={"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        renamed=_CLIP_OLD,
    ),
    "granite_vision": Seeing(
        "LlavaNext",
        {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        SIGLIP,
        ("LlavaNext", {**_NEXT_SIZE, "size": {"height": 32, "width": 32}, "do_center_crop": False}),
        ("LlavaNext", {"patch_size": 8, "vision_feature_select_strategy": "full"}),
        config={
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
            "vision_feature_layer": [-2, -1], "vision_feature_select_strategy": "full",
        },
        renamed=_CLIP_OLD,
    ),
    "granite4_vision": Seeing(
        "Granite4Vision",
        {
            "model_type": "granite4_vision_text", "num_hidden_layers": 4, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {**SIGLIP, "hidden_size": 64, "num_hidden_layers": 3},
        ("LlavaNext", {**_NEXT_SIZE, "size": {"height": 32, "width": 32}, "do_center_crop": False}),
        ("Granite4Vision", {"patch_size": 8, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"}),
        config={
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]], "vision_feature_select_strategy": "full",
            "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0], [-2, 2]], "spatial_vision_layer": -1,
            "spatial_target_layers": [1, 1, 3, 3],
            "qformer_config": {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48,
                               "cross_attention_frequency": 1, "use_qformer_text_input": False},
        },
        projector="out_linear",
        tower_linear=r".*(vision_tower.*(q_proj|v_proj|fc1|out_proj|patch_embedding)|_projectors.*\.(query|dense|out_linear))",
        tower_dora=r".*vision_tower.*(q_proj|fc2)|.*_projectors.*out_linear|.*language_model.*v_proj",
    ),
    "lfm2_vl": Seeing(
        "Lfm2Vl",
        {"model_type": "lfm2", "layer_types": ["full_attention", "conv", "full_attention"], "block_multiple_of": 16},
        {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 8, **TOWER},
        ("Lfm2Vl", {
            "tile_size": 32, "encoder_patch_size": 8, "min_image_tokens": 2, "max_image_tokens": 4, "max_tiles": 4,
        }),
        ("Lfm2Vl", {}),
        around=(
            "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        ),
        text_linear=r".*language_model.*\.(q_proj|v_proj|w2|in_proj)",
        renamed=(*OLD, ("model.vision_tower.", "vision_tower.vision_model.")),
    ),
    "aya": Seeing(
        "AyaVision", {"model_type": "cohere2", "sliding_window": 20},
        SIGLIP,
        ("GotOcr2", {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 4}),
        ("AyaVision", {"patch_size": 8, "img_size": 32, "downsample_factor": 2}),
        mark="<|IMG_PATCH|>",
        place="<image>",
        around=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", "TILE"),
        config={"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6},
        renamed=_CLIP_OLD,
    ),
    "cohere2_vision": Seeing(
        "Cohere2Vision", {"model_type": "cohere2", "sliding_window": 20},
        SIGLIP,
        ("Cohere2Vision", {"size": {"height": 32, "width": 32}, "max_patches": 4, "patch_size": 2}),
        ("Cohere2Vision", {}),
        around=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
        named={
            "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>", "image_token": "<image>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        config={"alignment_intermediate_size": 32},
        renamed=_CLIP_OLD,
    ),
    "lighton_ocr": Seeing(
        "LightOnOcr", {"model_type": "qwen3", "head_dim": 16}, PIXTRAL,
        ("Pixtral", {"size": {"longest_edge": 64}, "patch_size": {"height": 16, "width": 16}}),
        ("LightOnOcr", {"patch_size": 8, "spatial_merge_size": 2}),
        mark="<|image_pad|>",
        around=("<|vision_pad|>", "<|vision_end|>"),
        named={
            "image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>",
        },
        config={"spatial_merge_size": 2},
        projector="vision_projection",
        tower_linear=r".*(vision_encoder.*(q_proj|o_proj|up_proj|patch_conv)|vision_projection.*(linear|merging))",
        tower_dora=r".*vision_encoder.*(q_proj|down_proj)|.*language_model.*v_proj",
        refused=("small",),
    ),
    "qianfan_ocr": Seeing(
        "QianfanOCR", {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "qianfan_ocr_vision", **_INTERNVL},
        ("GotOcr2", _CROPS),
        ("QianfanOCR", {"image_seq_length": 4}),
        mark="<IMG_CONTEXT>",
        original=False,
        place="<image>",
        around=("<image>", "<img>", "</img>"),
        named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        tower_linear=r".*(vision_tower.*(q_proj|v_proj|fc1|projection_layer|patch_embeddings.projection)"
        r"|multi_modal_projector.*linear_\d)",
    ),
    "vipllava": Seeing(
        "VipLlava", _LLAMA, CLIP, ("CLIP", _CLIP_SIZE),
        ("Llava", {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}),
        config={"vision_feature_layers": [-2, -1]},
        renamed=_CLIP_OLD,
    ),
    "deepseek_vl": Seeing(
        "DeepseekVL", _LLAMA, SIGLIP,
        ("DeepseekVL", {"size": {"height": 32, "width": 32}, "min_size": 4}),
        ("DeepseekVL", {"num_image_tokens": 16}),
        mark="<image_placeholder>",
        named={"image_token": "<image_placeholder>"},
        projector="aligner",
        tower_linear=r".*(vision_model.*(q_proj|v_proj|fc1|out_proj|patch_embedding)|aligner.*linear)",
        tower_dora=r".*vision_model.*(q_proj|fc2)|.*language_model.*v_proj",
    ),
    "llava_onevision": Seeing(
        "LlavaOnevision", {"model_type": "qwen2", "use_sliding_window": False}, SIGLIP,
        ("LlavaOnevision", {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": _PINPOINTS}),
        ("LlavaOnevision", {
            "num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9",
        }),
        videos=("LlavaOnevision", {"size": {"height": 32, "width": 32}}),
        config={
            "image_grid_pinpoints": _PINPOINTS, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        most=1,
        renamed=_CLIP_OLD,
    ),
    "janus": Seeing(
        "Janus", _LLAMA,
        {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
            "mlp_ratio": 1.5, "projection_dim": 64, "num_image_tokens": 16, "initializer_range": 0.4,
        },
        ("Janus", {"size": {"height": 32, "width": 32}, "min_size": 4}),
        ("Janus", {"num_image_tokens": 16}),
        mark="<image_placeholder>",
        around=("<begin_of_image>", "<end_of_image>"),
        named={
            "image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>",
        },
        config={"vq_config": {
            "embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1],
            "num_res_blocks": 1, "projection_dim": 64, "image_token_embed_dim": 64, "num_patches": 4,
        }},
        projector="aligner",
        tower_linear=r"model\.(vision_model.*(q_proj|v_proj|fc1|projection_layer|patch_embedding)"
        r"|aligner\.(fc1|hidden_layers\.0))",
        tower_dora=r".*vision_model.*(q_proj|fc2)|.*language_model.*v_proj",
    ),
    "idefics2": Seeing(
        "Idefics2", {"model_type": "mistral", "sliding_window": None}, _PATCHES,
        ("Idefics2", {"size": {"shortest_edge": 16, "longest_edge": 32}, "do_image_splitting": True}),
        ("Idefics2", {"image_seq_len": 4}),
        around=("<fake_token_around_image>",),
        config={"perceiver_config": {
            "hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 16, "num_key_value_heads": 1,
        }},
        projector="connector",
        tower_linear=r".*(vision_model.*(q_proj|k_proj|v_proj|fc1|out_proj|patch_embedding)|connector.*proj)",
        tower_dora=r".*vision_model.*(q_proj|fc2)|.*text_model.*v_proj",
        text_linear=r".*text_model.*\.(q_proj|v_proj|down_proj)",
        refused=("one pixel high",),  # its quarters have no pixel
    ),
    "minicpm_v": Seeing(
        "MiniCPMV4_6",
        {
            "model_type": "qwen3_5_text", "head_dim": 32, "num_hidden_layers": 4, "linear_num_key_heads": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5,
            },
        },
        {"image_size": 32, "patch_size": 4, **TOWER},
        ("MiniCPMV4_6", {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4}),
        ("MiniCPMV4_6", {}),
        mark="<|image_pad|>",
        around=(
            "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>",
        ),
        named={
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
            "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
        },
        videos=("MiniCPMV4_6", {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4}),
        config={"insert_layer_id": 0},
        projector="model.merger",  # by "merger" alone peft takes `vit_merger`, too
        tower_linear=r".*(vision_tower.*(q_proj|out_proj|fc1|patch_embedding)|merger.*linear)",
        tower_dora=r".*vision_tower.*(q_proj|fc2)|.*language_model.*v_proj",
    ),
    "ovis2": Seeing(
        "Ovis2", {"model_type": "qwen2", "use_sliding_window": False},
        {"image_size": 32, "patch_size": 8, "vocab_size": 40, "hidden_stride": 2, **TOWER},
        ("Ovis2", {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 4}),
        ("Ovis2", {"image_seq_length": 4}),
        mark="<IMG_ATOM>",
        place="<image>",
        around=("<image>", *_OVIS_MARKS),
        marks=("visual_indicator_token_ids", _OVIS_MARKS),
        config={"hidden_size": 64},
        sized=True,
        projector="visual_embeddings_table",
        tower_linear=r".*vision_tower.*(q_proj|out_proj|up_proj|head_linear|patch_embedding)",
        tower_dora=r".*vision_tower.*(q_proj|down_proj)|.*language_model.*v_proj",
    ),
    "got_ocr2": Seeing(
        "GotOcr2", {"model_type": "qwen2", "use_sliding_window": False},
        {
            "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 32,
            "image_size": 128, "patch_size": 2, "global_attn_indexes": [], "window_size": 8, "initializer_range": 0.4,
        },
        ("GotOcr2", {"size": {"height": 128, "width": 128}}),
        ("GotOcr2", {}),
        mark="<imgpad>",
        nested=False,
        around=("<img>", "</img>"),
        tower_linear=r".*(vision_tower.*(qkv|lin1|patch_embed.projection)|multi_modal_projector.*proj)",
        tower_dora=r".*vision_tower.*(qkv|lin2)|.*language_model.*v_proj",
    ),
}  # fmt: skip
