"""Text parts of checkpoints with a vision tower: its tensors are left out, adapters of the whole model are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.families.hy_v4 import HY_V4
from chorus.core.model.families.inkling.family import INKLING
from chorus.core.model.families.longcat.family import LONGCAT_FLASH
from chorus.core.model.families.mimo.family import MIMO_V2_FLASH
from chorus.core.model.families.nemotron_h import NEMOTRON_H
from chorus.core.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from chorus.core.model.families.registry import FAMILIES
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.open_weights import open_weights
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter

from .model.checkpoints.quantization.twins import weights
from .tiny_families import BESIDE_TEXT, INDEXER, LATENT, LATENT_WINDOWS, QWEN4_EXP, YARN

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

TEXT = {
    "vocab_size": 150,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "head_dim": 16,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
CLIP = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **TOWER}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
EARS = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}

#: architecture → configuration class, its text part, its tower
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 16, **TOWER},
    ),
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **TOWER},
    ),
    "Gemma4ForConditionalGeneration": (
        "Gemma4Config",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "initializer_range": 0.05,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
        {"head_dim": 16, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16, **TOWER},
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        "Gemma4UnifiedConfig",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "initializer_range": 0.05,
        },
        {"mm_embed_dim": 32, "mm_posemb_size": 16},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {"rope_parameters": MROPE, "layer_types": ["full_attention"] * 3},
        {**QWEN_TOWER, "fullatt_block_indexes": [0]},
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        {"rope_parameters": MROPE},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Lfm2VlForConditionalGeneration": (
        "Lfm2VlConfig",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
        {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 8, **TOWER},
    ),
}
OPERATORS = [(name, kernels) for name in MODELS for kernels in ("torch", "native")]


#: Likewise, of families whose layers are those of families whose paths are all tested: see `test_families.py`.
RENAMED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {"rope_parameters": MROPE, "layer_types": ["full_attention"] * 3},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        {"rope_parameters": MROPE, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "mlp_only_layers": [1]},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Glm4vForConditionalGeneration": (
        "Glm4vConfig",
        {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}, "pad_token_id": 0},
        QWEN_TOWER,
    ),
    "Glm4vMoeForConditionalGeneration": (
        "Glm4vMoeConfig",
        {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}, "pad_token_id": 0,
         "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
        QWEN_TOWER,
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": (
        "Ernie4_5_VLMoeConfig",
        {"rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]}, "moe_num_experts": 8, "moe_k": 3,
         "moe_intermediate_size": [40, 24], "moe_num_shared_experts": 1},
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
    ),
    "Exaone4_5_ForConditionalGeneration": (
        "Exaone4_5_Config",
        {"model_type": "exaone4", "sliding_window": 20, "pad_token_id": 0},
        {**QWEN_TOWER, "fullatt_block_indexes": [0], "num_key_value_heads": 1},
    ),
    "Llama4ForConditionalGeneration": (
        "Llama4Config",
        {"attention_chunk_size": 16, "num_local_experts": 8, "intermediate_size_mlp": 96, "moe_layers": [0, 2]},
        {"image_size": 28, "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 32,
         "projector_output_dim": 32, **TOWER},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 16, **TOWER},
    ),
    "LlavaNextForConditionalGeneration": ("LlavaNextConfig", {"model_type": "llama"}, CLIP),
    "LlavaNextVideoForConditionalGeneration": ("LlavaNextVideoConfig", {"model_type": "llama"}, CLIP),
    "LlavaOnevisionForConditionalGeneration": (
        "LlavaOnevisionConfig", {"model_type": "qwen2", "use_sliding_window": False}, CLIP
    ),
    "InternVLForConditionalGeneration": (
        "InternVLConfig",
        {"model_type": "qwen3"},
        {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14], **TOWER},
    ),
    "Idefics3ForConditionalGeneration": (
        "Idefics3Config", {"model_type": "llama"}, {**CLIP, "model_type": "idefics3_vision"}
    ),
    "SmolVLMForConditionalGeneration": (
        "SmolVLMConfig", {"model_type": "llama"}, {**CLIP, "model_type": "smolvlm_vision"}
    ),
    "AyaVisionForConditionalGeneration": (
        "AyaVisionConfig", {"model_type": "cohere2", "sliding_window": 20, "pad_token_id": 0}, SIGLIP
    ),
    "Cohere2VisionForConditionalGeneration": (
        "Cohere2VisionConfig", {"model_type": "cohere2", "sliding_window": 20, "pad_token_id": 0}, SIGLIP
    ),
    "Kimi_K25ForConditionalGeneration": (
        "Kimi_K25Config",
        {**LATENT, "head_dim": 8, "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2,
         "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 40, "num_mtp_layers": 0},
        {"patch_size": 14, **TOWER},
    ),
    "Glm46VForConditionalGeneration": (
        "Glm46VConfig",
        {"model_type": "glm4v_text", "pad_token_id": 0,
         "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        {"model_type": "glm4v_vision", **QWEN_TOWER},
    ),
    "Lfm3VlForConditionalGeneration": (
        "Lfm3VlConfig",
        {"model_type": "lfm3", "layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 20,
         "pad_token_id": 0},
        {"patch_size": 8, "num_key_value_heads": 1, **TOWER},
    ),
    "LightOnOcrForConditionalGeneration": (
        "LightOnOcrConfig", {"model_type": "qwen3"}, {"model_type": "pixtral", "head_dim": 16, **TOWER}
    ),
    "PaddleOCRVLForConditionalGeneration": (
        "PaddleOCRVLConfig",
        {"rope_parameters": MROPE, "use_bias": True},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
         "image_size": 28},
    ),
    "GlmOcrForConditionalGeneration": (
        "GlmOcrConfig",
        {"pad_token_id": 0, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        {**QWEN_TOWER, "hidden_size": 64},
    ),
    "VipLlavaForConditionalGeneration": ("VipLlavaConfig", {"model_type": "llama"}, CLIP),
    "VideoLlavaForConditionalGeneration": ("VideoLlavaConfig", {"model_type": "llama"}, CLIP),
    "VideoLlama3ForConditionalGeneration": (
        "VideoLlama3Config",
        {"model_type": "qwen2", "use_sliding_window": False},
        {"model_type": "video_llama_3_vision", "patch_size": 8, **TOWER},
    ),
    "Idefics2ForConditionalGeneration": (
        "Idefics2Config",
        {"model_type": "mistral", "sliding_window": None},
        {"image_size": 28, "patch_size": 14, **TOWER},
    ),
    "Ovis2ForConditionalGeneration": (
        "Ovis2Config",
        {"model_type": "qwen2", "use_sliding_window": False},
        {"image_size": 28, "patch_size": 14, "vocab_size": 40, **TOWER},
    ),
    "GotOcr2ForConditionalGeneration": (
        "GotOcr2Config",
        {"model_type": "qwen2", "use_sliding_window": False},
        {"hidden_size": 32, "output_channels": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32,
         "image_size": 64, "patch_size": 16, "global_attn_indexes": [0], "window_size": 2},
    ),
    "QianfanOCRForConditionalGeneration": (
        "QianfanOCRConfig", {"model_type": "qwen3"}, {"image_size": [28, 28], "patch_size": [14, 14], **TOWER}
    ),
    "DeepseekVLForConditionalGeneration": ("DeepseekVLConfig", {"model_type": "llama"}, SIGLIP),
    "DeepseekVLHybridForConditionalGeneration": ("DeepseekVLHybridConfig", {"model_type": "llama"}, SIGLIP),
    "Granite4VisionForConditionalGeneration": (
        "Granite4VisionConfig",
        {"model_type": "granite4_vision_text", "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
         "logits_scaling": 2.0, "attention_multiplier": 0.2},
        {**SIGLIP, "hidden_size": 64},
    ),
    "JanusForConditionalGeneration": (
        "JanusConfig",
        {"model_type": "llama"},
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "projection_dim": 64,
         "num_image_tokens": 4},
    ),
    "MiniCPMV4_6ForConditionalGeneration": (
        "MiniCPMV4_6Config",
        {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        {"image_size": 28, "patch_size": 14, "insert_layer_id": 0, **TOWER},
    ),
    "FastVlmForConditionalGeneration": ("FastVlmConfig", {"model_type": "qwen2", "use_sliding_window": False}, CLIP),
    "PerceptionLMForConditionalGeneration": (
        "PerceptionLMConfig", {"model_type": "llama"}, {**CLIP, "model_args": {"embed_dim": 32}}
    ),
    "HyperCLOVAXVisionV2ForConditionalGeneration": (
        "HyperCLOVAXVisionV2Config",
        {"model_type": "hyperclovax", "logits_scaling": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        {"model_type": "qwen2_5_vl_vision", **QWEN_TOWER, "fullatt_block_indexes": [0]},
    ),
    "Cosmos3OmniForConditionalGeneration": (
        "Cosmos3OmniConfig",
        {"model_type": "qwen3_vl_text", "rope_parameters": MROPE},
        {"model_type": "qwen3_vl_vision", **QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Cosmos3EdgeForConditionalGeneration": (
        "Cosmos3EdgeConfig", {"rope_parameters": MROPE, "attention_bias": True}, {"num_patches": 16, **TOWER}
    ),
    "MiniCPMV4_7ForConditionalGeneration": (
        "MiniCPMV4_7Config",
        {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        {"image_size": 28, "patch_size": 14, **TOWER},
    ),
    "Qwen4ExpForConditionalGeneration": (
        "Qwen4ExpConfig",
        {**QWEN4_EXP, "model_type": "qwen4_exp_text", "num_hidden_layers": 4, "eos_token_id": 2},
        {"model_type": "qwen4_exp_vision", **QWEN_TOWER, "num_position_embeddings": 16},
    ),
    "MiniCPMOcrForConditionalGeneration": (
        "MiniCPMOcrConfig",
        {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        {"image_size": 28, "patch_size": 14, **TOWER},
    ),
    "GraniteDoclingForConditionalGeneration": (
        "GraniteDoclingConfig",
        {"pad_token_id": 0, "attention_multiplier": 0.2, "embedding_multiplier": 1.5},
        {"image_size": 64, "patch_size": 8, "out_hidden_size": 64, "deepstack_visual_indexes": [0], **TOWER},
    ),
    "HunYuanVLForConditionalGeneration": (
        "HunYuanVLConfig",
        {"pad_token_id": 0,
         "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 10000.0, "factor": 1.0,
                             "mrope_section": [2, 2, 2, 2]}},
        {"patch_size": 8, "max_image_size": 64, "out_hidden_size": 64, **TOWER},
    ),
    "HYV4VLForConditionalGeneration": (
        "HYV4VLConfig",
        {**LATENT, **INDEXER, "rope_parameters": {"rope_theta": 500.0, "mrope_section": [2, 1, 1]},
         "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "hc_mult": 3,
         "swiglu_limit": 0.5, "indexer_types": ["full", "full", "shared"], "rms_norm_eps": 0.02, "pad_token_id": 0},
        {"patch_size": 8, "max_image_size": 64, "out_hidden_size": 64, **TOWER},
    ),
    "Glm5NextForConditionalGeneration": (
        "Glm5NextConfig",
        {**LATENT, **INDEXER, "qk_rope_head_dim": 0, "index_kpool": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 40, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "swiglu_limit": 0.5,
         "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
         "mlp_layer_types": ["dense", "sparse", "sparse"], "pad_token_id": 0},
        {**QWEN_TOWER, "projection_intermediate_size": 32},
    ),
    "InklingForConditionalGeneration": (
        "InklingConfig",
        {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "swa_num_attention_heads": 6,
         "swa_num_key_value_heads": 3, "swa_head_dim": 24, "sliding_window_size": 20, "d_rel": 6, "rel_extent": 24,
         "mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 40, "n_routed_experts": 8,
         "num_experts_per_tok": 3, "route_scale": 1.5, "logits_mup_width_multiplier": 2.0, "log_scaling_n_floor": 12,
         "vocab_size": 160, "unpadded_vocab_size": 150, "pad_token_id": 0},
        {**TOWER, "patch_size": 8, "num_hidden_layers": 5},
    ),
    "Emu3ForConditionalGeneration": ("Emu3Config", {"pad_token_id": 0}, {}),
    "AriaForConditionalGeneration": (
        "AriaConfig",
        {"moe_num_experts": 8, "moe_topk": 3, "intermediate_size": 40, "pad_token_id": 0},
        {**CLIP, "model_type": "idefics3_vision"},
    ),
    "Molmo2ForConditionalGeneration": (
        "Molmo2Config",
        {"additional_vocab_size": 20, "qk_norm_type": "olmo", "attention_bias": True, "rope_scaling_layers": [1],
         "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        {"image_size": [28, 28], "num_key_value_heads": 2, "head_dim": 16, **TOWER},
    ),
    "Apertus1p5ForConditionalGeneration": (
        "Apertus1p5Config",
        {"vocab_size": 170, "output_vocab_size": 155, "pad_token_id": 0},
        {"codebook_size": 16, "embed_dim": 32, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1],
         "num_res_blocks": 1, "resolution": 32},
    ),
    "CohereCompassForConditionalGeneration": (
        "CohereCompassConfig",
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 20,
         "logit_scale": 0.5, "pad_token_id": 0,
         "rope_parameters": {"full_attention": None, "sliding_attention": MROPE}},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "MllamaForConditionalGeneration": (
        "MllamaConfig",
        {"cross_attention_layers": [1], "pad_token_id": 0},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1,
         "attention_heads": 2, "vision_output_dim": 64, "image_size": 28, "intermediate_layers_indices": [0]},
    ),
    "MuseGlimmerForConditionalGeneration": (
        "MuseGlimmerConfig",
        {"sliding_window": 20, "attention_bias": True, "initializer_range": 0.1},
        {"pos_emb_height": 4, "pos_emb_width": 4, **TOWER},
    ),
    "MuseSparkForConditionalGeneration": (
        "MuseSparkConfig",
        {"sliding_window": 20, "attention_bias": True, "initializer_range": 0.1, "num_local_experts": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 40, "moe_hidden_size": 24,
         "mlp_layer_types": ["dense", "sparse", "sparse"]},
        BESIDE_TEXT["MuseSparkConfig"]["vision_config"],
    ),
    "Step3p7ForConditionalGeneration": (
        "Step3p7Config",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "num_sliding_attention_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "share_expert_dim": 24,
         "moe_intermediate_size": 40, "mlp_layer_types": ["dense", "sparse", "sparse"], "pad_token_id": 0,
         "swiglu_limits": [0.0, 0.0, 0.5], "swiglu_limits_shared": [0.0, 0.4, 0.0]},
        BESIDE_TEXT["Step3p7Config"]["vision_config"],
    ),
    "Phi4MultimodalForCausalLM": (
        "Phi4MultimodalConfig", {"pad_token_id": 0}, {"image_size": 28, "patch_size": 14, "crop_size": 28, **TOWER}
    ),
    "NemotronH_Omni_Reasoning_V3": (
        "NemotronH_Omni_Reasoning_V3_Config",
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-", "mamba_num_heads": 8, "mamba_head_dim": 12,
         "ssm_state_size": 16, "n_groups": 2},
        {"model_type": "radio", "video_temporal_patch_size": 2, "patch_size": 14, "image_size": 28, **TOWER},
    ),
    "Dots3NoteForConditionalGeneration": (
        "Dots3NoteConfig",
        {**LATENT, **LATENT_WINDOWS, **INDEXER, "n_routed_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0,
         "moe_intermediate_size": 40, "shared_experts_intermediate_size": 24, "initializer_range": 0.1},
        {"patch_size": 14, "adapter_in_dim": 32, "adapter_out_dim": 64, "mlp_layer_types": ["dense"], **TOWER},
    ),
    "MiniMaxM3SparseForConditionalGeneration": (
        "MiniMaxM3VLConfig",
        {"partial_rotary_factor": 0.5, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40,
         "dense_intermediate_size": 96, "shared_intermediate_size": 24, "index_n_heads": 2, "index_head_dim": 12,
         "index_block_size": 4, "index_topk_blocks": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
         "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "initializer_range": 0.1},
        {"patch_size": 14, "image_size": 28, **TOWER},
    ),
    "MistralLarge4ForConditionalGeneration": (
        "MistralLarge4Config",
        {"model_type": "mistral_large4_text", **LATENT, **INDEXER, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "pad_token_id": 0, "no_rope_layers": [1, 0, 1]},
        {"model_type": "pixtral", "head_dim": 16, **TOWER},
    ),
    "FuyuForCausalLM": ("FuyuConfig", {"model_type": "persimmon"}, {}),
    "Qwen2_5OmniThinkerForConditionalGeneration": (
        "Qwen2_5OmniThinkerConfig", {"rope_parameters": MROPE}, {**QWEN_TOWER, "fullatt_block_indexes": [0]}
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": (
        "Qwen3OmniMoeThinkerConfig",
        {"rope_parameters": MROPE, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "mlp_only_layers": [1]},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
}  # fmt: skip

#: Parts of a configuration besides those of texts and images, small.
OTHER_PARTS: dict[str, dict[str, Any]] = {
    "Idefics2ForConditionalGeneration": {
        "perceiver_config": {"hidden_size": 64, "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2,
                             "resampler_head_dim": 16, "num_key_value_heads": 1},
    },
    "DeepseekVLHybridForConditionalGeneration": {
        "high_res_vision_config": {"model_type": "sam_vision_model", "hidden_size": 32, "output_channels": 32,
                                   "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64,
                                   "global_attn_indexes": [0], "window_size": 2},
    },
    "Granite4VisionForConditionalGeneration": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1, 1, 2, 2],
        "qformer_config": {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 32},
    },
    "InklingForConditionalGeneration": {"audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8}},
    "Emu3ForConditionalGeneration": {
        "vq_config": {"codebook_size": 16, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
                      "hidden_size": 32, "temporal_downsample_factor": 1},
        "vocabulary_map": {"<image>": 149},
    },
    "Molmo2ForConditionalGeneration": {
        "adapter_config": {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                           "intermediate_size": 32, "text_hidden_size": 64, "vision_feature_layer": [0]},
    },
    "Apertus1p5ForConditionalGeneration": {
        "image_token_offset": 144, "audio_token_offset": 160,
        "audio_config": {"codebook_size": 10, "codebook_dim": 8, "num_filters": 4, "hidden_size": 8,
                         "num_lstm_layers": 1, "upsampling_ratios": [2, 2]},
    },
    "Dots3NoteForConditionalGeneration": {
        "audio_config": {**TOWER, "adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 8,
                         "feature_size": 16},
    },
    "MiniMaxM3SparseForConditionalGeneration": {"projector_hidden_size": 32},
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 64, "projector_hidden_size": 32},
    "MuseSparkForConditionalGeneration": {
        name: fields for name, fields in BESIDE_TEXT["MuseSparkConfig"].items() if name != "vision_config"
    },
    "Cosmos3EdgeForConditionalGeneration": {"projector_hidden_size": 32},
    "Phi4MultimodalForCausalLM": {
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2,
                         "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8},
    },
    "MiniCPMV4_7ForConditionalGeneration": {"insert_layer_id": 0},
    "MiniCPMOcrForConditionalGeneration": {"insert_layer_id": 0},
    "Ovis2ForConditionalGeneration": {"vocab_size": 150, "hidden_size": 64},  # of its head, until it is tied
    "Qwen2_5OmniThinkerForConditionalGeneration": {"audio_config": {**EARS, "n_window": 4}},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {
        "audio_config": {**EARS, "n_window": 4, "downsample_hidden_size": 8}
    },
    "JanusForConditionalGeneration": {
        "vq_config": {"embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1],
                      "num_res_blocks": 1, "projection_dim": 64, "image_token_embed_dim": 64, "num_patches": 2},
    },
}  # fmt: skip

#: Those which have the fields of the text part beside those of other parts.
FLAT = {"Phi4MultimodalForCausalLM"}

#: Saved under the names of memory: of those that transformers would write, "blocks" and "encoder" are no checkpoint's.
IN_MEMORY = {"Kimi_K25ForConditionalGeneration", "QianfanOCRForConditionalGeneration"}

#: Published checkpoints' names of architectures that transformers saves under others.
PUBLISHED = {
    "KimiK25ForConditionalGeneration",
    "InternVLChatModel",
    "Qwen2_5OmniModel",
    "Ernie4_5_VL_MoeForConditionalGeneration",
}

#: The thinker with its talker, see `test_a_thinker_is_the_same_with_its_talker`.
WITH_TALKERS = {"Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"}

#: Of which transformers can't make a model here, for want of a package: see test_streams.py. PaliGemma is served with
#: images alone: see media/test_seeing_families.py.
ELSEWHERE = {
    *("Gemma3nForConditionalGeneration", "PaliGemmaForConditionalGeneration"),
    *(
        "Dots3NoteForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "Qwen4ExpForCausalLM",
    ),  # the text parts of others, in the table of paths
}


#: Families that leave out draft layers, and no tower.
DRAFTING = (QWEN3_5, QWEN3_5_MOE, NEMOTRON_H, MIMO_V2_FLASH, HY_V4, LONGCAT_FLASH, INKLING)


def test_every_architecture_is_covered():
    seeing = {name for name, family in FAMILIES.items() if family.tensors.left_out}
    drafting = {each for family in DRAFTING for each in family.architectures}
    assert set(MODELS) | set(RENAMED) | PUBLISHED | WITH_TALKERS | ELSEWHERE == seeing - drafting


OF_TEXT = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"


ALL = "all-linear"
CASES = [
    *((architecture, targets, kernels) for architecture, kernels in OPERATORS for targets in (OF_TEXT, ALL)),
    # PEFT wraps Llama 4's router, whose output is a pair, as a linear layer, which can't be computed; it fails to wrap
    # whole layers of Qwen3-Omni's audio tower, which have the names of linear ones
    *((name, OF_TEXT if name.startswith(("Llama4", "Qwen3Omni")) else ALL, "auto") for name in RENAMED),
]


@pytest.mark.parametrize(
    ("architecture", "targets", "kernels"),
    CASES,
    ids=[f"{kernels}-{'all' if targets == ALL else 'text'}-{name}" for name, targets, kernels in CASES],
)
def test_text_is_answered_as_transformers_and_peft_do(tmp_path, architecture, targets, drive):
    """An adapter of all linear layers has tensors of the tower, too, which are said to have no effect."""
    check_text(tmp_path, architecture, *{**MODELS, **RENAMED}[architecture], targets, drive)


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize("targets", [OF_TEXT.replace("v_proj", "kv_b_proj|q_b_proj|kv_a_proj_with_mqa"), "all-linear"])
def test_mistral_small_4_is_told_by_the_type_of_its_text_part(tmp_path, targets, drive):
    text = {
        **LATENT, "qk_nope_head_dim": 8, "model_type": "mistral4", "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "pad_token_id": 0,
        "rope_parameters": {
            **YARN, "original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.4, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }  # fmt: skip
    architecture = "Mistral3ForConditionalGeneration"
    check_text(tmp_path, architecture, "Mistral3Config", text, MODELS[architecture][2], targets, drive)
    assert read_model_config(tmp_path / "model").attention.log_scaling


def save_whole(architecture: str, name: str, text: dict[str, Any], vision: dict[str, Any], path: Path) -> Any:
    """A tiny random model with a tower, which is saved in `path`. Arguments: see `MODELS`."""
    base = whole_of(architecture, name, text, vision)
    base.save_pretrained(path, save_original_format=architecture not in IN_MEMORY)
    return base


def check_text(tmp_path, architecture, name, text, vision, targets, drive):
    from peft import LoraConfig, get_peft_model

    base = save_whole(architecture, name, text, vision, tmp_path / "model")
    model = get_peft_model(
        base,
        LoraConfig(
            r=5,
            lora_alpha=9,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            target_modules=targets,
        ),
    )
    model.save_pretrained(str(tmp_path / "adapter"))
    prompts = {"a": torch.randint(3, 150, (40,)).tolist(), "b": torch.randint(3, 150, (9,)).tolist()}
    want, scores = {}, {}
    for adapter in (False, True):
        (model.base_model.enable_adapter_layers if adapter else model.base_model.disable_adapter_layers)()
        for key, prompt in prompts.items():
            want[f"{key}{adapter}"], scores[f"{key}{adapter}"] = _greedy(model, prompt)
    it = _Checkpoint(tmp_path / "model", {"adapter": tmp_path / "adapter"})
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=128)
    for adapter in (False, True):
        for key, prompt in prompts.items():
            driver.add(f"{key}{adapter}", "adapter" if adapter else None, prompt, max_tokens=8, logprobs=0)
    answers = driver.drain()
    assert {key: answer.tokens for key, answer in answers.items()} == want
    for key, answer in answers.items():
        assert [each.logprob for each in answer.logprobs] == pytest.approx(scores[key], abs=2e-3), key
    left_out = driver.engine.adapters.inspect(tmp_path / "adapter").num_left_out
    # of Qwen3-Omni PEFT wraps the audio tower's projections of these names, too
    assert (left_out > 0) == (targets == ALL or architecture.startswith("Qwen3Omni"))
    assert any(want[f"{key}True"] != want[f"{key}False"] for key in prompts)


def make_whole(architecture: str, **fields: Any) -> Any:
    """A model of an architecture of MODELS or RENAMED. fields: of its own and of its text part's configuration."""
    name, text, vision = {**MODELS, **RENAMED}[architecture]
    return whole_of(architecture, name, {**text, **fields}, vision, **fields)


def whole_of(architecture: str, name: str, text: dict[str, Any], vision: dict[str, Any], **fields: Any) -> Any:
    """A model of random weights. name: of its configuration class."""
    import transformers

    others = OTHER_PARTS.get(architecture, {})
    text = {**TEXT, **text}
    text = text if architecture in FLAT else {"text_config": text}
    config = getattr(transformers, name)(**text, vision_config=vision, **others, **fields)
    torch.manual_seed(0)
    base = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in base.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("global_scale"):
                parameter.uniform_(0.5, 1.5)
            elif ".softmax_scaling." in parameter_name or parameter_name.endswith("rotary_emb.alpha"):
                parameter.add_(torch.empty_like(parameter).uniform_(0.0, 0.4))
        for module in base.modules():  # a tower's, which begin with 0, would be told apart from none
            if type(module).__name__.endswith("Router") and not bool(module.weight.any()):
                module.weight.normal_()
    return base


class _Checkpoint:
    """A model and its adapters, as `drive` takes them."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self.model, self.adapters = model, adapters


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Eight tokens, and their log-probabilities."""
    tokens, scores, base = list(prompt), list[float](), model.get_base_model()
    if type(base).__name__.startswith("Llama4"):  # in transformers 5.24 the whole model fails without images
        model = base.language_model
    with torch.inference_mode():
        for _ in range(8):
            logprobs = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            tokens.append(int(logprobs.argmax()))
            scores.append(float(logprobs[tokens[-1]]))
    return tokens[len(prompt) :], scores


def test_experts_that_are_stored_transposed_are_the_same(tmp_path):
    """As the published checkpoints of Qwen3-VL-MoE have them, next to what transformers saves."""
    import transformers

    name, text, vision = RENAMED["Qwen3VLMoeForConditionalGeneration"]
    config = getattr(transformers, name)(text_config={**TEXT, **text}, vision_config=vision)
    transformers.Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path)

    def experts() -> list[list[torch.Tensor]]:
        model = read_model_config(tmp_path)
        with open_weights(tmp_path, model, torch.float32) as found:
            layers = [layer.get("experts") for layer in found.layers()]
        return [[*layer.gate_up, *layer.down] for layer in layers if layer is not None]

    saved, tensors = experts(), load_file(tmp_path / "model.safetensors")
    stacked = {key: each.mT.contiguous() for key, each in tensors.items() if ".experts." in key}
    assert stacked
    save_file({**tensors, **stacked}, tmp_path / "model.safetensors")
    for one, other in zip(saved, experts(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize(("tied", "outer"), [(True, None), (False, True), (False, False)])
def test_whether_embeddings_are_tied_is_the_whole_models(tmp_path, tied, outer):
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**TEXT, "tie_word_embeddings": tied}}
    if outer is not None:
        raw["tie_word_embeddings"] = outer
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).tie_word_embeddings is (tied if outer is None else outer)


@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("Llama4ForConditionalGeneration", ["text_config"]),
        *((each, ["thinker_config", "text_config"]) for each in sorted(WITH_TALKERS)),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_tied_if_the_part_with_the_head_says_so(tmp_path, architecture, parts, tied):
    """The whole model has no head of its own, and what it says has no effect in transformers."""
    raw = {**TEXT, "model_type": "llama4_text", "tie_word_embeddings": tied}
    if len(parts) > 1:
        _, text, _ = RENAMED[architecture.replace("ForConditional", "ThinkerForConditional")]
        raw = {"tie_word_embeddings": tied, parts[1]: {**TEXT, **text, "tie_word_embeddings": not tied}}
    raw = {"architectures": [architecture], "tie_word_embeddings": not tied, parts[0]: raw}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).tie_word_embeddings is tied


def test_a_text_part_may_leave_out_shapes_that_transformers_knows(tmp_path):
    """LLaVA 1.5's configuration, as it is published; its text part is refused where it is of an unknown type."""
    text = {"_name_or_path": "lmsys/vicuna-7b-v1.5", "max_position_embeddings": 4096, "model_type": "llama",
            "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064}  # fmt: skip
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.intermediate_size) == (4096, 32, 11008)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "text_config": {**text, "model_type": "opt"}}))
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type is 'opt': not supported as a text part"):
        read_model_config(tmp_path)


def test_kimi_k2_5_is_deepseek_v3_without_its_draft_layers(tmp_path):
    """The names of its published configuration and tensors."""
    text = {**TEXT, **LATENT, "head_dim": 8, "model_type": "kimi_k2", "n_routed_experts": 8, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}  # fmt: skip
    raw = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = read_model_config(tmp_path).tensors
    assert "language_model.model.layers.3.mlp.gate.weight".startswith(tensors.left_out)
    assert "mm_projector.proj.0.weight".startswith(tensors.left_out)
    assert not "language_model.model.layers.2.mlp.gate.weight".startswith(tensors.left_out)


def test_internvl_has_the_same_text_part_as_it_was_first_published(tmp_path):
    """Under names of the model's own code, which transformers does not have."""
    import transformers

    name, text, vision = RENAMED["InternVLForConditionalGeneration"]
    config = getattr(transformers, name)(text_config={**TEXT, **text}, vision_config=vision, tie_word_embeddings=False)
    model = transformers.InternVLForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    (tmp_path / "first").mkdir()
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    renamed = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_model.",
        "model.multi_modal_projector.": "mlp1.",
        "lm_head.": "language_model.lm_head.",
    }
    found = {
        next(new + key.removeprefix(own) for own, new in renamed.items() if key.startswith(own)): each
        for key, each in tensors.items()
    }
    save_file(found, tmp_path / "first" / "model.safetensors")
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    first = {"architectures": ["InternVLChatModel"], "llm_config": raw["text_config"], "tie_word_embeddings": False}
    (tmp_path / "first" / "config.json").write_text(json.dumps(first))
    for ours, theirs in zip(weights(tmp_path / "first"), weights(tmp_path / "new"), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_nemotron_omni_has_the_same_text_part_as_it_was_first_published(tmp_path):
    make_whole("NemotronH_Omni_Reasoning_V3").save_pretrained(tmp_path / "new")
    (tmp_path / "first").mkdir()
    shutil.copy(tmp_path / "new" / "model.safetensors", tmp_path / "first")
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    raw["llm_config"] = raw.pop("text_config")
    (tmp_path / "first" / "config.json").write_text(json.dumps(raw))
    for ours, theirs in zip(weights(tmp_path / "first"), weights(tmp_path / "new"), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("architecture", sorted(WITH_TALKERS))
def test_a_thinker_is_the_same_with_its_talker(tmp_path, architecture):
    """As the whole model is published: everything of the thinker is one level further down."""
    import transformers

    thinker = architecture.replace("ForConditional", "ThinkerForConditional")
    name, text, vision = RENAMED[thinker]
    others = OTHER_PARTS[thinker]
    config = getattr(transformers, name)(text_config={**TEXT, **text}, vision_config=vision, **others)
    getattr(transformers, thinker)(config).save_pretrained(tmp_path / "alone")
    (tmp_path / "whole").mkdir()
    tensors = load_file(tmp_path / "alone" / "model.safetensors")
    talker = {f"talker.model.layers.0.{each}": torch.ones(2) for each in ("a", "b")}
    save_file({f"thinker.{key}": each for key, each in tensors.items()} | talker, tmp_path / "whole/model.safetensors")
    raw = json.loads((tmp_path / "alone" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(
        json.dumps({"architectures": [architecture], "thinker_config": raw})
    )
    (tmp_path / "renamed").mkdir()  # trainers also save the thinker alone, by the whole model's names
    save_file({f"thinker.{key}": each for key, each in tensors.items()}, tmp_path / "renamed/model.safetensors")
    (tmp_path / "renamed" / "config.json").write_text(json.dumps(raw))
    for path in ("whole", "renamed"):
        for ours, theirs in zip(weights(tmp_path / path), weights(tmp_path / "alone"), strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("kernels", ["torch"])
def test_an_adapter_of_the_tower_alone_is_refused(tmp_path, drive):
    import transformers
    from peft import LoraConfig, get_peft_model

    architecture = "Qwen2_5_VLForConditionalGeneration"
    name, text, vision = MODELS[architecture]
    base = getattr(transformers, architecture)(
        getattr(transformers, name)(text_config={**TEXT, **text}, vision_config=vision)
    )
    base.save_pretrained(tmp_path / "model")
    tower = LoraConfig(r=2, target_modules=r".*visual.*\.(qkv|proj)", task_type="CAUSAL_LM")
    get_peft_model(base, tower).save_pretrained(str(tmp_path / "adapter"))
    driver = drive(_Checkpoint(tmp_path / "model", {}), max_model_len=64)
    with pytest.raises(AdapterFormatError, match="target"):
        driver.engine.adapters.inspect(tmp_path / "adapter")


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "with-its-talker"])
@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.thinker.", "thinker.base_model.model."])
@pytest.mark.parametrize("architecture", sorted(WITH_TALKERS))
def test_an_adapter_of_a_thinker_may_touch_its_towers(tmp_path, architecture, whole, prefix):
    """Trainers load the thinker alone or the whole model, and either form of the base model serves what they save.
    Automodel had the thinker outside of PEFT's prefix.
    """
    from peft import LoraConfig, get_peft_model

    thinker = architecture.replace("ForConditional", "ThinkerForConditional")
    base = make_whole(thinker)
    base.save_pretrained(tmp_path / "alone")
    raw = json.loads((tmp_path / "alone" / "config.json").read_text())
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(
        json.dumps({"architectures": [architecture], "thinker_config": raw})
    )
    ends = r".*(model\.layers|audio_tower|visual)\..*\.(q_proj|o_proj|out_proj|fc1|qkv)"
    lora = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=ends)
    get_peft_model(base, lora).save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors, outer = load_file(file), "base_model.model."
    of_towers = sum("audio_tower." in name or "visual." in name for name in tensors)
    save_file({name.replace(outer, prefix): each for name, each in tensors.items()}, file)
    paths = read_model_config(tmp_path / ("whole" if whole else "alone")).module_paths
    found = inspect_adapter(tmp_path / "adapter", paths)
    assert found.num_left_out == of_towers > 0
    assert [(part.targets, part.layers) for part in found.parts] == [(("q_proj", "o_proj"), (0, 1, 2))]
    own = {key: each for key, each in load_file(file).items() if "self_attn.q_proj" in key and "audio_tower" not in key}
    save_file(own, file)
    names = sorted({key.replace(outer, "").rpartition(".lora_")[0].removeprefix("thinker.") for key in own})
    if prefix.endswith("thinker."):
        names = [f"thinker.{name}" for name in names]
    adapter = tmp_path / "adapter" / "adapter_config.json"
    adapter.write_text(json.dumps({**json.loads(adapter.read_text()), "target_modules": names}))
    found = inspect_adapter(tmp_path / "adapter", paths)
    assert [(part.targets, part.layers) for part in found.parts] == [(("q_proj",), (0, 1, 2))]


@pytest.mark.parametrize("trained_whole", [False, True], ids=["trained-alone", "trained-whole"])
@pytest.mark.parametrize("architecture", sorted(WITH_TALKERS))
def test_trained_tokens_are_the_heads_if_peft_saw_the_thinker_alone(tmp_path, architecture, trained_whole):
    """The class of a whole model has no head: PEFT does not see that its thinker ties the two."""
    from peft import LoraConfig, get_peft_model

    base = make_whole(architecture.replace("ForConditional", "ThinkerForConditional"), tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "alone")
    tokens = {"embed_tokens": [3, 7]}
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=tokens)
    get_peft_model(base, lora).save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    if trained_whole:
        outer = "base_model.model."
        save_file({name.replace(outer, f"{outer}thinker."): each for name, each in load_file(file).items()}, file)
    found = inspect_adapter(tmp_path / "adapter", read_model_config(tmp_path / "alone").module_paths)
    want = {("embed_tokens_rows",)} if trained_whole else {("embed_tokens_rows",), ("lm_head_rows",)}
    assert {part.targets for part in found.parts if part.token_ids} == want
