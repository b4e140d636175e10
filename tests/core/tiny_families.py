"""Tiny random models of every family, made by transformers' own classes, with adapters and reference answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.choice import open_executor
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import ModelConfig
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.perf.inline_reads import InlineReads

from ..conftest import quiet
from ..greedy import MIN_MARGIN, after_drafts, switched, token_by_token
from ..kept import KeptAnswers, kept_files

MIN_ROUTER_MARGIN = 1e-4
"""As MIN_MARGIN, between the last expert that a token goes to and the first that it does not."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}

GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
}

#: With larger embeddings, a tied model answers with its last token.
GRANITE_TIED = {**GRANITE, "embedding_multiplier": 1.5, "residual_multiplier": 0.9}

LONGROPE = {
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.4, 2.0, 2.5],
        "long_factor": [1.0, 1.5, 3.0, 8.0, 16.0, 30.0],
    },
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}

#: Where scores of attention are large, and what it gives is normalised, larger weights amplify rounding: with 0.25,
#: transformers' own float32 logits of Zamba 2 are 0.04 off those of float64.
SMALL_WEIGHTS = {"initializer_range": 0.12}

#: An indexer that chooses among the tokens of tests' prompts. With few heads, many scores would be 0, and so equal.
INDEXER = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16}

#: Layers with windows over latents of other sizes (Dots 3 Note).
LATENT_WINDOWS = {
    "head_dim": 24, "sliding_window": 20, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16, "swa_kv_lora_rank": 40, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
}  # fmt: skip

#: Families that transformers computes, and saves, by another family's class, which their checkpoints do not name.
BY_ANOTHER = {
    "InternLM3Config": "InternLM3ForCausalLM",
    "IQuestCoderConfig": "IQuestCoderForCausalLM",
    "ExaoneConfig": "ExaoneForCausalLM",
    "SarvamMoEConfig": "SarvamMoEForCausalLM",
    "SarvamMLAConfig": "SarvamMLAForCausalLM",
}

#: Configuration classes of text parts whose models transformers' classes of models make, and not its auto classes.
OF_CLASSES = {
    "Emu3TextConfig": "Emu3ForCausalLM",
    "Mistral4Config": "Mistral4ForCausalLM",
    "MllamaTextConfig": "MllamaForCausalLM",
    "Glm5NextConfig": "Glm5NextForConditionalGeneration",
    "Step3p7Config": "Step3p7ForConditionalGeneration",
    "MuseSparkConfig": "MuseSparkForConditionalGeneration",
}

#: Those of whole models that see, whose fields here are of their text part: the other parts, small.
BESIDE_TEXT = {
    "Step3p7Config": {
        "vision_config": {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "mlp_ratio": 1.0
        }
    },
    "MuseSparkConfig": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "pos_emb_height": 4, "pos_emb_width": 4,
        },
        "audio_config": {
            "patch_sizes": [4], "hidden_sizes": [8], "depths": [1], "num_hidden_layers": 1, "out_hidden_size": 64
        },
        "out_hidden_size": 64,
        "projector_hidden_size": 32,
    },
}  # fmt: skip

#: name → (transformers' configuration class, its arguments, largest shard)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}, "50GB"),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}, "20KB"),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
        "50GB",
    ),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, "50GB"),
    "mistral": ("MistralConfig", {"head_dim": 24, "sliding_window": None}, "50GB"),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "hidden_size": 56, "num_key_value_heads": 1}, "20KB"),
    "qwen2-untied": ("Qwen2Config", {"rms_norm_eps": 1e-5, "num_hidden_layers": 3}, "50GB"),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "hidden_size": 40, "tie_word_embeddings": True}, "50GB"),
    "qwen3-biased": ("Qwen3Config", {"head_dim": 16, "attention_bias": True, "hidden_size": 48}, "20KB"),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16, "num_key_value_heads": 1}, "50GB"),
    "seed-oss-out-bias": ("SeedOssConfig", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}, "20KB"),
    "llama-dynamic-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
        "50GB",
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}, "50GB"),
    "mistral-window": ("MistralConfig", {"head_dim": 16, "sliding_window": 24}, "50GB"),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        "50GB",
    ),
    "ministral": (
        "MinistralConfig",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
        "50GB",
    ),
    "ministral-3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 24,
                "llama_4_scaling_beta": 0.4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        "50GB",
    ),
    "granite": ("GraniteConfig", {**GRANITE, "attention_multiplier": 0.11}, "50GB"),
    "granite-biased": (
        "GraniteConfig",
        {**GRANITE_TIED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "20KB",
    ),
    "granite-4": (
        "GraniteMoeHybridConfig",
        {
            **GRANITE_TIED,
            "layer_types": ["attention", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
        },
        "50GB",
    ),
    "granite-4-nope": (
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            "layer_types": ["attention", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": None,
            "attention_bias": True,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
        },
        "20KB",
    ),
    "phi-3": ("Phi3Config", {"pad_token_id": 0, "sliding_window": 30}, "50GB"),
    "phi-4-mini": ("Phi3Config", {"pad_token_id": 0, "tie_word_embeddings": True, **LONGROPE}, "20KB"),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "pad_token_id": 0}, "50GB"),
    "smollm3-untied": (
        "SmolLM3Config",
        {
            "no_rope_layers": [0, 1, 0],
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "pad_token_id": 0,
        },
        "20KB",
    ),
    "olmo-2": ("Olmo2Config", {}, "50GB"),
    "olmo-2-tied": ("Olmo2Config", {"tie_word_embeddings": True, "num_key_value_heads": 4, "hidden_size": 48}, "20KB"),
    "olmo-3": ("Olmo3Config", {"num_hidden_layers": 5, "sliding_window": 16}, "50GB"),
    "olmo-3-yarn": (
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        "20KB",
    ),
    "glm": ("GlmConfig", {"head_dim": 16, "pad_token_id": 0}, "50GB"),
    "glm-4": ("Glm4Config", {"head_dim": 16, "pad_token_id": 0}, "50GB"),
    "glm-4-tied": (
        "Glm4Config",
        {"head_dim": 32, "hidden_size": 48, "attention_bias": False, "pad_token_id": 0, "tie_word_embeddings": True},
        "20KB",
    ),
    "gemma": ("GemmaConfig", {"head_dim": 24}, "50GB"),
    "gemma-2": (
        "Gemma2Config",
        {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 18, "query_pre_attn_scalar": 24},
        "50GB",
    ),
    "gemma-2-untied": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "hidden_size": 48,
        },
        "20KB",
    ),
    "gemma-3": ("Gemma3TextConfig", {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 20}, "50GB"),
    "gemma-3-scaled": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "hidden_size": 48,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "20KB",
    ),
    "internlm-3": ("InternLM3Config", {"head_dim": 16}, "50GB"),
    "internlm-3-biased": ("InternLM3Config", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}, "20KB"),
    "exaone-4": ("Exaone4Config", {"num_hidden_layers": 5, "sliding_window": 20}, "50GB"),
    "exaone-4-whole": (
        "Exaone4Config",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
        "20KB",
    ),
    "cohere-2": (
        "Cohere2Config",
        {"num_hidden_layers": 5, "sliding_window": 20, "head_dim": 16, "pad_token_id": 0},
        "50GB",
    ),
    "cohere-2-untied": (
        "Cohere2Config",
        {
            "sliding_window": 28,
            "head_dim": 32,
            "hidden_size": 48,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "logit_scale": 0.5,
            "layer_types": ["full_attention", "sliding_attention"],
            "pad_token_id": 0,
        },
        "20KB",
    ),
    "olmo-1": ("OlmoConfig", {"attention_bias": True, "pad_token_id": 0}, "50GB"),
    "arcee": ("ArceeConfig", {"head_dim": 16, "mlp_bias": True}, "50GB"),
    "nemotron": ("NemotronConfig", {"head_dim": 32, "attention_bias": True, "num_key_value_heads": 4}, "20KB"),
    "jais-2": ("Jais2Config", {"hidden_size": 56, "head_dim": 14}, "50GB"),
    "apertus": ("ApertusConfig", {"pad_token_id": 0}, "50GB"),
    "starcoder-2": ("Starcoder2Config", {"sliding_window": 20, "initializer_range": 0.4}, "20KB"),
    "cohere-normed": ("CohereConfig", {"use_qk_norm": True, "pad_token_id": 0, "logit_scale": 0.5}, "50GB"),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 10000.0, "factor": 1.0},
            "attention_bias": True,
            "head_dim": 16,
        },
        "50GB",
    ),
    "nanochat": ("NanoChatConfig", {"final_logit_softcapping": 5.0, "attention_bias": True}, "50GB"),
    "phi-2": ("PhiConfig", {"partial_rotary_factor": 0.5}, "50GB"),
    "gpt-neox": (
        "GPTNeoXConfig",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "num_hidden_layers": 3,
            "initializer_range": 0.5,
        },
        "50GB",
    ),
    "gpt-2": ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}, "50GB"),
    "gpt-bigcode": ("GPTBigCodeConfig", {"initializer_range": 0.4}, "20KB"),
    "gpt-bigcode-heads": ("GPTBigCodeConfig", {"multi_query": False, "n_inner": 80, "initializer_range": 0.4}, "50GB"),
    "gpt-neo": (
        "GPTNeoConfig",
        {"attention_types": [[["global", "local"], 1]], "window_size": 20, "initializer_range": 0.2},
        "50GB",
    ),
    "gpt-j": ("GPTJConfig", {"rotary_dim": 8, "initializer_range": 0.3}, "50GB"),
    "codegen": ("CodeGenConfig", {"rotary_dim": 8, "initializer_range": 0.3}, "20KB"),
    "falcon-7b": ("FalconConfig", {"num_kv_heads": None, "initializer_range": 0.4}, "50GB"),
    "falcon-40b": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
        "20KB",
    ),
    "falcon-heads": (
        "FalconConfig",
        {"multi_query": False, "parallel_attn": False, "bias": True, "num_kv_heads": None, "initializer_range": 0.4},
        "50GB",
    ),
    "opt": ("OPTConfig", {"ffn_dim": 96, "init_std": 0.3, "pad_token_id": 0}, "50GB"),
    "biogpt": ("BioGptConfig", {"initializer_range": 0.3, "pad_token_id": 0}, "50GB"),
    "xglm": ("XGLMConfig", {"ffn_dim": 96, "init_std": 0.3, "pad_token_id": 0}, "20KB"),
    "gpt-neox-japanese": ("GPTNeoXJapaneseConfig", {"rotary_pct": 0.5, "initializer_range": 0.3}, "50GB"),
    "bitnet": ("BitNetConfig", {}, "50GB"),
    "bitnet-biased": (
        "BitNetConfig",
        {"attention_bias": True, "tie_word_embeddings": True, "hidden_size": 48, "num_key_value_heads": 4},
        "20KB",
    ),
    "diffllama": ("DiffLlamaConfig", {"num_key_value_heads": 2}, "50GB"),
    "diffllama-biased": (
        "DiffLlamaConfig",
        {
            "attention_bias": True,
            "num_key_value_heads": 4,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "lambda_std_dev": 0.4,
        },
        "20KB",
    ),
    "openai-gpt": (
        "OpenAIGPTConfig",
        {"hidden_size": 72, "initializer_range": 0.3, "tie_word_embeddings": False},
        "50GB",
    ),
    "openai-gpt-relu": (
        "OpenAIGPTConfig",
        {"afn": "relu", "hidden_size": 40, "initializer_range": 0.2, "tie_word_embeddings": False},
        "20KB",
    ),
    "bloom": ("BloomConfig", {"initializer_range": 0.3}, "50GB"),
    "bloom-heads": (
        "BloomConfig",
        {"num_attention_heads": 6, "hidden_size": 72, "initializer_range": 0.3, "tie_word_embeddings": False},
        "20KB",
    ),
    "mpt": ("MptConfig", {"max_seq_len": 256, "initializer_range": 0.3}, "50GB"),
    "mpt-clipped": (
        "MptConfig",
        {
            "max_seq_len": 256,
            "num_attention_heads": 6,
            "hidden_size": 72,
            "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.2},
            "initializer_range": 0.3,
        },
        "20KB",
    ),
    "olmo-1-clipped": ("OlmoConfig", {"clip_qkv": 1.0, "pad_token_id": 0, "num_key_value_heads": 4}, "50GB"),
    "persimmon": ("PersimmonConfig", {"initializer_range": 0.3}, "50GB"),
    "persimmon-plain": (
        "PersimmonConfig",
        {"qk_layernorm": False, "initializer_range": 0.3, "tie_word_embeddings": True, "hidden_size": 48},
        "20KB",
    ),
    "emu-3": ("Emu3TextConfig", {"pad_token_id": 0}, "50GB"),
    "cohere-compass": (
        "CohereCompassTextConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 20,
            "logit_scale": 0.5,
            "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]},
            },
        },
        "50GB",
    ),
    "apertus-1.5": (
        "Apertus1p5TextConfig",
        {"vocab_size": 170, "output_vocab_size": 150, "pad_token_id": 0},
        "50GB",
    ),
    "llama-4-dense": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "attention_chunk_size": 32,
            "floor_scale": 20,
            "attn_scale": 0.4,
            "intermediate_size_mlp": 96,
            "moe_layers": [],
        },
        "50GB",
    ),
}

#: Families with layers of attention of several shapes, which PyTorch's operators alone compute.
SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma-4": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 6,
            "sliding_window": 20,
            "final_logit_softcapping": 8.0,
            "initializer_range": 0.05,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        "50GB",
    ),
    "gemma-4-inputs": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "sliding_window": 20,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 150,
            "initializer_range": 0.05,
        },
        "20KB",
    ),
    "gemma-4-biased": (
        "Gemma4TextConfig",
        {
            "head_dim": 32,
            "global_head_dim": 48,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "hidden_size": 48,
            "attention_bias": True,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 5000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        "20KB",
    ),
    "gemma-3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 20,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 140,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.75, 0.0],
            "initializer_range": 0.05,
        },
        "50GB",
    ),
    "gemma-3n-biased": (
        "Gemma3nTextConfig",
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 16,
            "hidden_size": 48,
            "intermediate_size": [96, 64, 96, 128],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 150,
            "laurel_rank": 5,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "activation_sparsity_pattern": [0.0, 0.3, 0.0, 0.8],
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 8.0,
            "initializer_range": 0.1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        "20KB",
    ),
    "gemma-4-unified": (
        "Gemma4UnifiedTextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "initializer_range": 0.05,
        },
        "50GB",
    ),
}

QWEN3_5 = {
    "num_hidden_layers": 5, "full_attention_interval": 3, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip

GRANITE_H = {
    **GRANITE, "attention_multiplier": 0.25, "residual_multiplier": 0.6, "num_hidden_layers": 5,
    "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"], "num_local_experts": 0,
    "shared_intermediate_size": 80, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
}  # fmt: skip

#: Families with layers that have a state of fixed size, likewise.
HYBRIDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3.5": ("Qwen3_5TextConfig", QWEN3_5, "50GB"),
    "qwen3.5-tied": (
        "Qwen3_5TextConfig",
        {**QWEN3_5, "tie_word_embeddings": True, "attention_bias": True, "linear_num_value_heads": 2, "hidden_size": 48,
         "layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2, "linear_conv_kernel_dim": 3},
        "20KB",
    ),
    "lfm2": (
        "Lfm2Config",
        {"num_hidden_layers": 5, "layer_types": ["conv", "conv", "full_attention", "conv", "conv"],
         "block_multiple_of": 16, "block_ff_dim": 144, "tie_embedding": False, "pad_token_id": 0},
        "50GB",
    ),
    "lfm2-biased": (
        "Lfm2Config",
        {"num_hidden_layers": 2, "full_attn_idxs": [0], "conv_L_cache": 4, "conv_bias": True, "hidden_size": 48,
         "block_auto_adjust_ff_dim": False, "pad_token_id": 0},
        "20KB",
    ),
    "granite-4-h": ("GraniteMoeHybridConfig", GRANITE_H, "50GB"),
    "granite-4-h-biased": (
        "GraniteMoeHybridConfig",
        {**GRANITE_H, **GRANITE_TIED, "layer_types": ["attention", "mamba"], "num_hidden_layers": 2,
         "mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
         "tie_word_embeddings": True, "position_embedding_type": "rope", "attention_bias": True},
        "20KB",
    ),
    "lfm3": (
        "Lfm3Config",
        {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 20, "conv_L_cache": 5, "pad_token_id": 0,
         "tie_word_embeddings": False},
        "50GB",
    ),
    "lfm3-plain": (
        "Lfm3Config",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"], "head_dim": 32, "hidden_size": 48,
         "use_sandwich_norm": False, "attention_bias": True, "conv_bias": True, "pad_token_id": 0},
        "20KB",
    ),
    "olmo-hybrid": (
        "OlmoHybridConfig",
        {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
         "linear_value_head_dim": 12, "pad_token_id": 0},
        "50GB",
    ),
    "olmo-hybrid-wide-values": (  # transformers saves convolutions in three equal parts, whatever their widths
        "OlmoHybridConfig",
        {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 12,
         "linear_value_head_dim": 24, "linear_allow_neg_eigval": False, "pad_token_id": 0},
        "50GB",
    ),
}  # fmt: skip

LARA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24, "sliding_window": 20, "num_hidden_layers": 5, "pad_token_id": 0,
}  # fmt: skip

NEMOTRON_H = {
    "hybrid_override_pattern": "M-MM*-M", "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 12,
    "ssm_state_size": 16, "n_groups": 2,
}  # fmt: skip

#: Families with states that PyTorch's operators alone compute: with layers of one part.
ONE_PART: dict[str, tuple[str, dict[str, Any], str]] = {
    "nemotron-h": ("NemotronHConfig", NEMOTRON_H, "50GB"),
    "nemotron-h-biased": (
        "NemotronHConfig",
        {**NEMOTRON_H, "hybrid_override_pattern": "-*M-", "use_bias": True, "mlp_bias": True, "use_conv_bias": False,
         "n_groups": 1, "conv_kernel": 3, "hidden_size": 48, "tie_word_embeddings": True, "time_step_min": 0.6},
        "20KB",
    ),
}  # fmt: skip

FALCON_H1 = {
    "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6, "key_multiplier": 0.7, "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.75, "ssm_multipliers": [0.9, 0.5, 0.7, 0.8, 0.6],
    "mlp_multipliers": [0.8, 0.4],
}  # fmt: skip

#: Families with attention and a recurrent mixer side by side in each layer, likewise.
TWO_MIXERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon-h1": ("FalconH1Config", FALCON_H1, "50GB"),
    "falcon-h1-biased": (
        "FalconH1Config",
        {**FALCON_H1, "head_dim": 24, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True,
         "projectors_bias": True, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1,
         "mamba_conv_bias": False, "mamba_d_conv": 3, "hidden_size": 48, "tie_word_embeddings": True},
        "20KB",
    ),
    "falcon-h1-normed": (
        "FalconH1Config",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_d_ssm": None, "mamba_expand": 1, "mamba_proj_bias": True,
         "num_key_value_heads": 4, "num_hidden_layers": 3, "mlp_multipliers": None, "ssm_multipliers": None},
        "50GB",
    ),
}  # fmt: skip

#: Families with layers that text does not go through.
SKIPPED: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-3.2-vision": (
        "MllamaTextConfig", {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "pad_token_id": 0}, "50GB"
    ),
}  # fmt: skip

QWEN3_MOE = {
    "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "norm_topk_prob": True,
}  # fmt: skip

KIMI_LINEAR = {
    **LATENT, "num_experts": 16, "num_experts_per_token": 3, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5,
    "linear_head_dim": 16, "linear_num_heads": 4, "num_hidden_layers": 4, "pad_token_id": 0,
}  # fmt: skip

#: Families with a mixture of experts, likewise.
EXPERTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}, "50GB"),
    "mixtral-window": (
        "MixtralConfig",
        {"num_local_experts": 12, "num_experts_per_tok": 3, "sliding_window": 24, "head_dim": 32,
         "tie_word_embeddings": True, "hidden_size": 48, "intermediate_size": 40},
        "20KB",
    ),
    "qwen3-moe": ("Qwen3MoeConfig", QWEN3_MOE, "50GB"),
    "qwen3-moe-mixed": (
        "Qwen3MoeConfig",
        {**QWEN3_MOE, "norm_topk_prob": False, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3],
         "attention_bias": True, "num_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True},
        "20KB",
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 16, "num_experts_per_tok": 4, "pad_token_id": 0}, "50GB"),
    "olmoe-renormalised": (
        "OlmoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 8, "pad_token_id": 0, "norm_topk_prob": True, "hidden_size": 48,
         "num_key_value_heads": 4, "attention_bias": True},
        "20KB",
    ),
    "granite-moe": (
        "GraniteMoeConfig",
        {**GRANITE, "residual_multiplier": 0.9, "attention_multiplier": 0.11, "num_local_experts": 12,
         "num_experts_per_tok": 4},
        "50GB",
    ),
    "glm-4-moe": (
        "Glm4MoeConfig",
        {"n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 3,
         "head_dim": 32, "use_qk_norm": True, "routed_scaling_factor": 1.5, "attention_bias": True, "pad_token_id": 0},
        "50GB",
    ),
    "glm-4-moe-groups": (
        "Glm4MoeConfig",
        {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
         "first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": False, "pad_token_id": 0,
         "hidden_size": 48},
        "20KB",
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 24, "pad_token_id": 0,
         "intermediate_size": 64, "num_hidden_layers": 3, "swiglu_limit": 1.5,
         "rope_parameters": {**YARN, "truncate": False}},
        "50GB",
    ),
    "gpt-oss-plain": (
        "GptOssConfig",
        {"num_local_experts": 12, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16, "pad_token_id": 0,
         "hidden_size": 48, "intermediate_size": 40, "attention_bias": False, "tie_word_embeddings": True,
         "layer_types": ["full_attention", "sliding_attention"], "swiglu_alpha": 1.1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "20KB",
    ),
    "gemma-4-moe": (
        "Gemma4TextConfig",
        {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3,
         "sliding_window": 20, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 16,
         "top_k_experts": 4, "moe_intermediate_size": 24, "initializer_range": 0.05},
        "50GB",
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {**QWEN3_5, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 24},
        "50GB",
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
         "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
        "50GB",
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**LATENT, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4,
         "topk_group": 2, "first_k_dense_replace": 1, "attention_bias": True, "num_mtp_layers": 0,
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "20KB",
    ),
    "glm-4.7-flash": (
        "Glm4MoeLiteConfig",
        {**LATENT, "v_head_dim": 32, "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "num_hidden_layers": 3, "pad_token_id": 0},
        "50GB",
    ),
    "deepseek-v3.2": (
        "DeepseekV32Config",
        {**LATENT, **INDEXER, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
         "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "attention_bias": True, "num_mtp_layers": 0,
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "20KB",
    ),
    "glm-5": (
        "GlmMoeDsaConfig",
        {**LATENT, **INDEXER, "v_head_dim": 32, "n_routed_experts": 16, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "num_hidden_layers": 5, "index_head_dim": 24, "pad_token_id": 0,
         "indexer_types": ["full", "shared", "full", "full", "shared"]},
        "50GB",
    ),
    "ax-k2": (
        "AXK2Config",
        {**LATENT, **INDEXER, "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "routed_scaling_factor": 1.5, "num_hidden_layers": 3, "gated_norm_rank": 6, "pad_token_id": 0},
        "50GB",
    ),
    "ax-k2-groups": (
        "AXK2Config",
        {**LATENT, **INDEXER, "v_head_dim": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
         "topk_group": 2, "moe_intermediate_size": 24, "mlp_layer_types": ["sparse", "dense"], "gated_norm_rank": 4,
         "attention_bias": True, "hidden_size": 48, "pad_token_id": 0,
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "20KB",
    ),
    "dots-3-note": (
        "Dots3NoteTextConfig",
        {**LATENT, **INDEXER, **LATENT_WINDOWS, "n_routed_experts": 16, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "shared_experts_intermediate_size": 24, "n_shared_experts": 2,
         "routed_scaling_factor": 1.5, "num_hidden_layers": 4, "pad_token_id": 0, "initializer_range": 0.1},
        "50GB",
    ),
    "dots-3-note-full": (
        "Dots3NoteTextConfig",
        {**LATENT, **LATENT_WINDOWS, "swa_head_dim": 20, "use_dsa": False, "attention_bias": True, "hidden_size": 48,
         "sliding_window": 7, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
         "moe_intermediate_size": 24, "shared_experts_intermediate_size": 24, "num_hidden_layers": 3,
         "mlp_layer_types": ["sparse"] * 3, "tie_word_embeddings": True, "pad_token_id": 0, "initializer_range": 0.1,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "20KB",
    ),
    "minimax-m3": (
        "MiniMaxM3VLTextConfig",
        {"head_dim": 16, "partial_rotary_factor": 0.5, "num_local_experts": 16, "num_experts_per_tok": 3,
         "intermediate_size": 40, "dense_intermediate_size": 96, "shared_intermediate_size": 24, "num_hidden_layers": 3,
         "index_n_heads": 2, "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 3,
         "mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 1.5, "initializer_range": 0.1,
         "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
        "50GB",
    ),
    "minimax-m3-plain": (
        "MiniMaxM3VLTextConfig",
        {"head_dim": 24, "partial_rotary_factor": 0.5, "num_key_value_heads": 1, "num_local_experts": 8,
         "num_experts_per_tok": 2, "intermediate_size": 24, "dense_intermediate_size": 64,
         "shared_intermediate_size": 24, "index_n_heads": 1, "index_head_dim": 20, "index_block_size": 5,
         "index_topk_blocks": 2, "index_local_blocks": 0, "mlp_layer_types": ["sparse", "dense"], "hidden_size": 48,
         "swiglu_alpha": 1.2, "swiglu_limit": 1.5, "layer_types": ["minimax_m3_sparse"] * 2,
         "tie_word_embeddings": True, "initializer_range": 0.1},
        "20KB",
    ),
    "hy-v4": (
        "HYV4Config",
        {**LATENT, **INDEXER, "v_head_dim": 32, "n_routed_experts": 16, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "num_hidden_layers": 4, "index_head_dim": 24, "hc_mult": 3, "hc_magnitude": 1.5,
         "swiglu_limit": 0.6, "pad_token_id": 0, "indexer_types": ["full", "shared", "full", "shared"],
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "50GB",
    ),
    "glm-5.3-flash": (
        "Glm5NextConfig",
        {**LATENT, **INDEXER, "qk_rope_head_dim": 0, "index_kpool": 4, "n_routed_experts": 16, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "num_hidden_layers": 4, "linear_head_dim": 16, "linear_num_heads": 4,
         "linear_conv_kernel_dim": 3, "hc_mult": 3, "hc_sinkhorn_iters": 4, "swiglu_limit": 0.6, "pad_token_id": 0,
         "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
         "indexer_types": ["shared", "full", "shared", "full"],
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
         "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                           "out_hidden_size": 64, "projection_intermediate_size": 32}},
        "50GB",
    ),
    "hy-v4-biased": (
        "HYV4Config",
        {**LATENT, **INDEXER, "index_topk": 25, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
         "topk_group": 1, "moe_intermediate_size": 24, "hc_mult": 4, "swiglu_limit": 1.5, "attention_bias": True,
         "tie_word_embeddings": True, "mlp_layer_types": ["sparse", "dense"], "pad_token_id": 0},
        "20KB",
    ),
    "afmoe": (
        "AfmoeConfig",
        {"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "sliding_window": 20,
         "num_hidden_layers": 4, "num_shared_experts": 1, "route_scale": 1.5, "mup_enabled": True,
         "initializer_range": 0.1, "global_attn_every_n_layers": 3},
        "50GB",
    ),
    "kolibri-1": (
        "Kolibri1Config",
        {"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 40,
         "norm_topk_prob": True, "shared_expert_intermediate_size": 56, "sliding_window": 20, "num_hidden_layers": 4,
         "initializer_range": 0.1,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]},
        "50GB",
    ),
    "kolibri-1-whole": (
        "Kolibri1Config",
        {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 24, "sliding_window": 20, "layer_types": ["full_attention"] * 2,
         "initializer_range": 0.1, "hidden_size": 48, "tie_word_embeddings": True, "norm_topk_prob": False},
        "20KB",
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1,
         "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5,
         "pad_token_id": 0},
        "50GB",
    ),
    "nemotron-3": (
        "NemotronHConfig",
        {**NEMOTRON_H, "hybrid_override_pattern": "MEM*E-E", "n_routed_experts": 16, "num_experts_per_tok": 4,
         "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5,
         "n_group": 4, "topk_group": 2},
        "50GB",
    ),
    "nemotron-3-super": (
        "NemotronHConfig",
        {**NEMOTRON_H, "hybrid_override_pattern": "ME*E-", "n_routed_experts": 16, "num_experts_per_tok": 4,
         "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5,
         "moe_latent_size": 24, "n_group": 4, "topk_group": 2},
        "50GB",
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        {**KIMI_LINEAR, "q_lora_rank": None, "num_expert_group": 4, "topk_group": 2,
         "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
        "50GB",
    ),
    "kimi-linear-q-latents": (
        "KimiLinearConfig",
        {**KIMI_LINEAR, "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
         "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "attention_bias": True,
         "linear_head_dim": 12, "linear_num_heads": 2, "linear_conv_kernel_dim": 3, "num_shared_experts": 2,
         "moe_renormalize": False, "hidden_size": 48},
        "20KB",
    ),
    "ling-2.6": (
        "BailingHybridConfig",
        {**LATENT, "q_lora_rank": None, "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
         "num_hidden_layers": 4, "layer_group_size": 2, "first_k_dense_replace": 1, "kda_lower_bound": -0.7,
         "pad_token_id": 0},
        "50GB",
    ),
    "ling-2.6-q-latents": (
        "BailingHybridConfig",
        {**LATENT, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False, "num_hidden_layers": 3,
         "layer_types": ["full_attention", "linear_attention", "full_attention"], "attention_bias": True,
         "mlp_layer_types": ["sparse", "dense", "sparse"], "short_conv_kernel_size": 3, "kda_safe_gate": False,
         "pad_token_id": 0, "hidden_size": 48},
        "20KB",
    ),
    "granite-4-h-moe": (
        "GraniteMoeHybridConfig",
        {**GRANITE_H, "num_local_experts": 12, "num_experts_per_tok": 4, "intermediate_size": 40},
        "50GB",
    ),
    "llama-4": (
        "Llama4TextConfig",
        {"num_hidden_layers": 5, "head_dim": 16, "attention_chunk_size": 32, "floor_scale": 20, "attn_scale": 0.4,
         "num_local_experts": 8, "intermediate_size": 40, "intermediate_size_mlp": 96, "moe_layers": [0, 2, 3, 4]},
        "50GB",
    ),
    "phi-moe": (
        "PhimoeConfig",
        {"num_local_experts": 8, "intermediate_size": 40, "attention_bias": True, "lm_head_bias": True,
         "router_jitter_noise": 0.1, "pad_token_id": 0, "initializer_range": 0.2},
        "50GB",
    ),
    "step-3.7": (
        "Step3p7Config",
        {"head_dim": 16, "num_hidden_layers": 4, "n_routed_experts": 16, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "share_expert_dim": 24, "moe_router_scaling_factor": 1.5, "pad_token_id": 0,
         "sliding_window": 20, "num_sliding_attention_heads": 6,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "swiglu_limits": [None, 0.5, 0.0, 0.7],
         "swiglu_limits_shared": [0.4, 0.0, 0.6, 0.3],
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}},
        "50GB",
    ),
    "muse-spark": (
        "MuseSparkConfig",
        {"head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "moe_hidden_size": 24, "routed_scaling_factor": 1.5, "sliding_window": 20,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "initializer_range": 0.1},
        "50GB",
    ),
    "llama-4-several": (
        "Llama4TextConfig",
        {"num_hidden_layers": 3, "head_dim": 32, "attention_chunk_size": 16, "num_local_experts": 12,
         "num_experts_per_tok": 3, "intermediate_size": 24, "intermediate_size_mlp": 64, "hidden_size": 48,
         "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1], "use_qk_norm": False, "attention_bias": True,
         "tie_word_embeddings": True,
         "layer_types": ["full_attention", "chunked_attention", "chunked_attention"]},
        "20KB",
    ),
}  # fmt: skip

DEEPSEEK_EXPERTS = {
    "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "pad_token_id": 0,
}  # fmt: skip

QWEN4_EXP = {
    "num_hidden_layers": 4, "head_dim": 16, "num_key_value_heads": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "hc_count": 3,
    "hc_lowrank": 12, "ple_layer_ids": [1, 3], "ple_embed_dim": 24, "ple_conv_kernel_size": 3, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4,
    "indexer_n_heads": 6, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 12,
    "indexer_compress_ratio": 4, "intermediate_size": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [2, 1, 1]},
}  # fmt: skip

ZAYA = {
    "head_dim": 16, "num_hidden_layers": 3, "num_experts": 8, "moe_intermediate_size": 40, "router_hidden_size": 24,
    "intermediate_size": None, "tie_word_embeddings": True,
}  # fmt: skip

#: Families whose layers others here have, too, under other names.
RENAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3-next": (
        "Qwen3NextConfig",
        {**QWEN3_5, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "mlp_only_layers": [1],
         "shared_expert_intermediate_size": 24, "num_hidden_layers": 4},
        "50GB",
    ),
    "ernie-4.5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True, "pad_token_id": 0}, "50GB"),
    "ernie-4.5-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 16, "moe_k": 3, "moe_intermediate_size": 40, "num_hidden_layers": 3,
         "moe_num_shared_experts": 2, "pad_token_id": 0},
        "50GB",
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "num_hidden_layers": 3,
         "shared_expert_intermediate_size": 24, "mlp_only_layers": [1], "use_sliding_window": True,
         "sliding_window": 20},
        "50GB",
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {**GRANITE, "residual_multiplier": 0.9, "attention_multiplier": 0.11, "num_local_experts": 12,
         "num_experts_per_tok": 4, "shared_intermediate_size": 40},
        "50GB",
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 16, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16, "intermediate_size": 40},
        "50GB",
    ),
    "exaone-moe": (
        "ExaoneMoeConfig",
        {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 5,
         "sliding_window": 20, "pad_token_id": 0},
        "50GB",
    ),
    "dots-1": (
        "Dots1Config",
        {**DEEPSEEK_EXPERTS, "num_hidden_layers": 3, "first_k_dense_replace": 1, "sliding_window": 24,
         "max_window_layers": 1, "attention_bias": True},
        "50GB",
    ),
    "solar-open": ("SolarOpenConfig", {**DEEPSEEK_EXPERTS, "head_dim": 32, "attention_bias": True}, "50GB"),
    "cohere": ("CohereConfig", {"pad_token_id": 0, "attention_bias": True}, "50GB"),
    "helium": ("HeliumConfig", {"head_dim": 16, "pad_token_id": 0}, "50GB"),
    "hyperclova-x": (
        "HyperCLOVAXConfig", {**GRANITE_TIED, "embedding_multiplier": 3.0, "attention_multiplier": None}, "50GB"
    ),
    "cwm": ("CwmConfig", {"head_dim": 16, "sliding_window": 20, "num_hidden_layers": 5}, "50GB"),
    "iquest-coder": ("IQuestCoderConfig", {"head_dim": 32, "attention_bias": True}, "50GB"),
    "mellum": (
        "MellumConfig",
        {**QWEN3_MOE, "num_hidden_layers": 3, "sliding_window": 20,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "mlp_layer_types": ["sparse", "dense", "sparse"]},
        "50GB",
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1Config",
        {"num_experts": 16, "moe_topk": [3, 3], "intermediate_size": 40, "head_dim": 16, "num_hidden_layers": 2},
        "50GB",
    ),
    "hunyuan-3": (
        "HYV3Config",
        {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16,
         "num_hidden_layers": 3},
        "50GB",
    ),
    "bamba": (
        "BambaConfig",
        {"num_hidden_layers": 4, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
         "mamba_n_groups": 2, "attention_bias": True, "mlp_bias": True},
        "50GB",
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 5, "hidden_size": 48, "num_key_value_heads": 1, "lru_width": 64, "logits_soft_cap": 5.0,
         "attention_window_size": 20, "w_init_variance_scale": 1.0},
        "50GB",
    ),
    "recurrent-gemma-biased": (
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 3, "block_types": ["attention", "recurrent"], "attention_bias": True, "conv1d_width": 3,
         "tie_word_embeddings": False, "w_init_variance_scale": 1.0},
        "20KB",
    ),
    "mamba-1": (
        "MambaConfig",
        {"num_hidden_layers": 3, "state_size": 8, "intermediate_size": 128, "time_step_rank": 6},
        "20KB",
    ),
    "mamba-1-biased": (
        "MambaConfig",
        {"hidden_size": 48, "num_hidden_layers": 2, "conv_kernel": 3, "use_conv_bias": False, "use_bias": True,
         "intermediate_size": 128, "tie_word_embeddings": False, "state_size": 40, "time_step_rank": 6},
        "50GB",
    ),
    "falcon-mamba": (
        "FalconMambaConfig",
        {"num_hidden_layers": 3, "state_size": 12, "intermediate_size": 128, "mixer_rms_eps": 1e-3},
        "50GB",
    ),
    "jamba": (
        "JambaConfig",
        {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6, "mamba_d_state": 8},
        "50GB",
    ),
    "jamba-dense": (
        "JambaConfig",
        {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_dt_rank": 6,
         "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
         "tie_word_embeddings": True},
        "20KB",
    ),
    "zamba": (
        "ZambaConfig",
        {"num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid",
                                                       "hybrid"],
         "mamba_d_state": 8, "mamba_dt_rank": 6, **SMALL_WEIGHTS},
        "50GB",
    ),
    "zamba-biased": (
        "ZambaConfig",
        {"num_hidden_layers": 5, "hidden_size": 48, "num_key_value_heads": 4, "attn_layer_period": 2,
         "attn_layer_offset": 1, "n_mamba_heads": 4, "mamba_d_conv": 3, "mamba_conv_bias": False,
         "mamba_proj_bias": True, "mamba_d_state": 12, "hidden_act": "silu", "tie_word_embeddings": False,
         **SMALL_WEIGHTS},
        "20KB",
    ),
    "zamba-2": (
        "Zamba2Config",
        {"num_hidden_layers": 7, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid",
                                                       "hybrid", "linear_attention", "hybrid"],
         "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_d_state": 16, "mamba_ngroups": 2, "num_mem_blocks": 2,
         "use_shared_attention_adapter": True, "adapter_rank": 6, "use_mem_rope": True, **SMALL_WEIGHTS},
        "50GB",
    ),
    "zamba-2-biased": (
        "Zamba2Config",
        {"num_hidden_layers": 4, "layers_block_type": ["hybrid", "hybrid", "linear_attention", "hybrid"],
         "hidden_size": 48, "n_mamba_heads": 4, "mamba_d_state": 24, "mamba_d_conv": 3, "adapter_rank": 10,
         "add_bias_linear": True, "hidden_act": "gelu_pytorch_tanh", **SMALL_WEIGHTS},
        "20KB",
    ),
    "mamba-2": (
        "Mamba2Config",
        {"num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
        "20KB",
    ),
    "mamba-2-biased": (
        "Mamba2Config",
        {"hidden_size": 48, "num_heads": 4, "head_dim": 12, "expand": 1, "state_size": 24, "n_groups": 1,
         "conv_kernel": 3, "use_conv_bias": False, "use_bias": True, "tie_word_embeddings": True},
        "50GB",
    ),
    "granite-swa": (
        "GraniteSWAConfig",
        {**GRANITE_TIED, "attention_multiplier": 0.11, "num_hidden_layers": 5, "sliding_window": 20,
         "layer_rope_theta": [0, 500, 10000.0, 0.0, 500.0], "attention_bias": True},
        "50GB",
    ),
    "granite-moe-swa": (
        "GraniteMoeSWAConfig",
        {**GRANITE, "residual_multiplier": 0.9, "attention_multiplier": 0.11, "num_local_experts": 12,
         "num_experts_per_tok": 4, "shared_intermediate_size": 40, "num_hidden_layers": 2, "sliding_window": 20},
        "50GB",
    ),
    "flex-olmo": ("FlexOlmoConfig", {"num_experts": 7, "num_experts_per_tok": 5, "pad_token_id": 0}, "50GB"),
    "vault-gemma": (
        "VaultGemmaConfig", {"head_dim": 32, "num_hidden_layers": 3, "sliding_window": 18, "pad_token_id": 0}, "50GB"
    ),
    "youtu": ("YoutuConfig", {**LATENT, "attention_bias": True, "rope_parameters": YARN}, "50GB"),
    "minicpm-3": (
        "MiniCPM3Config",
        {**LATENT, "v_head_dim": None, "scale_emb": 3.0, "scale_depth": 1.1, "dim_model_base": 40, "mlp_bias": True},
        "50GB",
    ),
    "flint": (
        "FlintConfig",
        {"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 24, "sliding_window": 20, "num_hidden_layers": 4, "mlp_only_layers": [1],
         "pad_token_id": 0},
        "50GB",
    ),
    "deepseek-v3.2-dense": (
        "DeepseekV32Config",
        {**LATENT, **INDEXER, "index_topk": 25, "num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 3},
        "50GB",
    ),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, "use_parallel_residual": True, "head_dim": 16}, "50GB"),
    "stablelm-before": ("StableLmConfig", {"partial_rotary_factor": 0.5, "hidden_size": 48}, "50GB"),
    "exaone-3": ("ExaoneConfig", {"num_key_value_heads": 2, "pad_token_id": 0}, "50GB"),
    "sarvam-moe": (
        "SarvamMoEConfig",
        {**DEEPSEEK_EXPERTS, "head_dim": 16, "num_hidden_layers": 2, "attention_bias": True},
        "50GB",
    ),
    "deepseek-v2-groups": (
        "DeepseekV2Config",
        {**LATENT, "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4,
         "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "n_shared_experts": 1},
        "50GB",
    ),
    "lara-mini": ("LaraMiniConfig", LARA, "50GB"),
    "aria": (
        "AriaTextConfig",
        {"moe_num_experts": 8, "moe_topk": 3, "intermediate_size": 40, "moe_num_shared_experts": 2, "pad_token_id": 0},
        "50GB",
    ),
    "ax-k1": (
        "AXK1Config",
        {**LATENT, **DEEPSEEK_EXPERTS, "num_hidden_layers": 3, "n_group": 4, "topk_group": 2},
        "50GB",
    ),
    "mistral-4": (
        "Mistral4Config",
        {**LATENT, **DEEPSEEK_EXPERTS, "qk_nope_head_dim": 8, "n_group": 1, "topk_group": 1,
         "rope_parameters": {**YARN, "original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.4, "mscale": 1.0,
                             "mscale_all_dim": 1.0}},
        "50GB",
    ),
    "mimo-v2-flash": (
        "MiMoV2FlashConfig",
        {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 16, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "num_hidden_layers": 4,
         "sliding_window": 20, "routed_scaling_factor": 1.5, "pad_token_id": 0,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        "50GB",
    ),
    "mimo-v2-flash-biased": (
        "MiMoV2FlashConfig",
        {"head_dim": 48, "v_head_dim": 8, "num_key_value_heads": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 24, "n_group": 2, "sliding_window": 16, "attention_bias": True, "hidden_size": 48,
         "attention_value_scale": None, "num_hidden_layers": 2, "mlp_layer_types": ["sparse", "sparse"],
         "tie_word_embeddings": True, "pad_token_id": 0,
         "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 90.0,
                                                   "partial_rotary_factor": 0.5}}},
        "20KB",
    ),
    "qwen4-exp": ("Qwen4ExpTextConfig", QWEN4_EXP, "50GB"),
    "qwen4-exp-longer": (
        "Qwen4ExpTextConfig",
        {**QWEN4_EXP, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3,
         "ple_layer_ids": [3], "ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 18, "ple_conv_kernel_size": 2,
         "hc_count": 2, "output_gate_type": "sigmoid", "attention_bias": True, "indexer_n_heads": 5,
         "indexer_budget": 6, "indexer_compress_ratio": 3, "tie_word_embeddings": True, "norm_topk_prob": False,
         "num_key_value_heads": 1, "hidden_size": 48, "eos_token_id": [2, 3],
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "20KB",
    ),
    "zaya": ("ZayaConfig", ZAYA, "50GB"),
    "zaya-windows": (
        "ZayaConfig",
        {**ZAYA, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "sliding_window": 20, "cca_time0": 1,
         "cca_time1": 3, "num_key_value_heads": 1, "num_attention_heads": 2, "lm_head_bias": True,
         "tie_word_embeddings": False, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 48, "num_experts": 5,
         "router_hidden_size": 12},
        "20KB",
    ),
    "jetmoe": (
        "JetMoeConfig",
        {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 8, "num_experts_per_tok": 3,
         "intermediate_size": 40, "initializer_range": 0.2, "rms_norm_eps": 1e-5, "pad_token_id": 0},
        "50GB",
    ),
    "jetmoe-pairs": (
        "JetMoeConfig",
        {"num_key_value_heads": 4, "kv_channels": 8, "num_local_experts": 5, "num_experts_per_tok": 2,
         "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 24, "initializer_range": 0.2,
         "tie_word_embeddings": False, "activation_function": "gelu_pytorch_tanh", "pad_token_id": 0},
        "20KB",
    ),
    "inkling": (
        "InklingTextConfig",
        {"num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
         "head_dim": 16, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "swa_head_dim": 24,
         "sliding_window_size": 20, "d_rel": 6, "rel_extent": 24, "log_scaling_n_floor": 12, "log_scaling_alpha": 0.4,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_intermediate_size": 40,
         "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "route_scale": 1.5,
         "logits_mup_width_multiplier": 2.0, "pad_token_id": 0},
        "50GB",
    ),
    "inkling-padded": (
        "InklingTextConfig",
        {"vocab_size": 160, "unpadded_vocab_size": 150, "head_dim": 24, "num_key_value_heads": 1, "hidden_size": 48,
         "swa_num_attention_heads": 4, "swa_num_key_value_heads": 1, "swa_head_dim": 24, "sliding_window_size": 16,
         "local_layer_ids": [1], "d_rel": 4, "rel_extent": 9, "conv_kernel_size": 3, "n_routed_experts": 5,
         "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24, "route_scale": 2.0,
         "hidden_act": "gelu_pytorch_tanh", "logits_mup_width_multiplier": 3.0, "pad_token_id": 0},
        "20KB",
    ),
    "dbrx": (
        "DbrxConfig",
        {"d_model": 64, "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
         "ffn_config": {"moe_num_experts": 8, "moe_top_k": 3, "ffn_hidden_size": 40}},
        "50GB",
    ),
    "dbrx-unscaled": (
        "DbrxConfig",
        {"d_model": 48, "hidden_size": 48, "attn_config": {"kv_n_heads": 1, "clip_qkv": 6.0, "rope_theta": 10000.0},
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
         "ffn_config": {"moe_num_experts": 12, "moe_top_k": 2, "ffn_hidden_size": 24,
                        "moe_normalize_expert_weights": None}},
        "20KB",
    ),
    "laguna": (
        "LagunaConfig",
        {"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 24, "num_hidden_layers": 3, "sliding_window": 20,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "pad_token_id": 0,
         "moe_routed_scaling_factor": 1.5},
        "50GB",
    ),
    "laguna-heads": (
        "LagunaConfig",
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 24, "num_hidden_layers": 4, "sliding_window": 16,
         "num_attention_heads_per_layer": [4, 6, 6, 4], "pad_token_id": 0, "gating": "per-element",
         "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]},
        "20KB",
    ),
    "laguna-elements": (
        "LagunaConfig",
        {"head_dim": 32, "gating": "per-element", "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24, "attention_bias": True,
         "mlp_layer_types": ["sparse", "sparse"], "tie_word_embeddings": True, "hidden_size": 48, "pad_token_id": 0},
        "20KB",
    ),
    "cohere-2-moe": (
        "Cohere2MoeConfig",
        {"head_dim": 16, "num_experts": 12, "num_experts_per_tok": 3, "intermediate_size": 40, "num_shared_experts": 2,
         "sliding_window": 20, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
         "prefix_dense_intermediate_size": 48, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "pad_token_id": 0},
        "50GB",
    ),
    "longcat-flash": (
        "LongcatFlashConfig",
        {**LATENT, "head_dim": 8, "num_hidden_layers": 4, "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 3,
         "expert_ffn_hidden_size": 40, "routed_scaling_factor": 1.5},
        "50GB",
    ),
    "longcat-flash-busy": (
        "LongcatFlashConfig",
        {**LATENT, "head_dim": 8, "num_hidden_layers": 2, "n_routed_experts": 6, "zero_expert_num": 0, "moe_topk": 2,
         "expert_ffn_hidden_size": 24, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh",
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "20KB",
    ),
    "sarvam-mla": (
        "SarvamMLAConfig",
        {**LATENT, **DEEPSEEK_EXPERTS, "q_lora_rank": None,
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "50GB",
    ),
}  # fmt: skip

EVERY = {**FAMILIES, **SHAPES, **HYBRIDS, **ONE_PART, **TWO_MIXERS, **SKIPPED, **EXPERTS, **RENAMED}
"""All of these by name."""


ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
LINEAR = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
OF_CHANNELS = ["q_proj@linear", "k_proj@linear", "v_proj@linear", "o_proj@linear", "b_proj", "g_proj@linear", "f_proj"]
GATES = ["f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
UNITS = ["linear_y", "linear_x", "linear_out"]
LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
OF_WINDOWS = [f"{each}@sliding" for each in (*LATENTS, "g_proj", "r_proj", *ATTENTION)]
INDEXERS = [
    "indexer.index_qk_proj",
    "indexer.wq_b",
    "indexer.wk",
    "indexer.weights_proj",
    "indexer.q_proj",
    "indexer.k_proj",
]
BLOCKS = ["mamba.in_proj", "mamba.out_proj", "linear", "invocation_down", "invocation_up"]
OF_STREAMS = [f"{part}_{own}" for part in ("attn", "mlp", "join") for own in ("down", "up", "give")]
OF_STREAMS += ["key_proj", "value_proj"]
CONVOLVED = ["v_proj_current", "v_proj_delayed", "router.fc1", "router.down_proj", "router.fc2"]
BLOCKS += [f"{each}_invocation_{part}" for each in "qkv" for part in ("down", "up")]
NO_OUT_PROJ = ("nemotron-h", "nemotron-3", "falcon-h1", "mamba-1", "mamba-2", "falcon-mamba")
"""Names of families on whose `out_proj` PEFT puts no LoRA."""

#: name → (rank, alpha, targets), of which a model has some
ADAPTERS = {
    "r3-all": (
        3,
        6,
        [
            *(*ATTENTION, "g_proj", "r_proj", *LINEAR, *OF_CHANNELS, *GATES, "in_proj", "x_proj"),
            *(*UNITS, *LATENTS, *OF_WINDOWS, *INDEXERS, "query_router", *MLP, *BLOCKS, *CONVOLVED[:2]),
        ],
    ),
    "r8-qv": (
        8,
        16,
        [
            *(
                "q_proj",
                "v_proj",
                "in_proj_b",
                "in_proj",
                "kv_b_proj",
                "v_proj@linear",
                "f_b_proj",
                "linear_x",
                "x_proj",
                "mamba.in_proj",
                "q_invocation_up",
                "invocation_down",
                "v_proj@sliding",
            ),
            "indexer.wk",
            "kv_b_proj@sliding",
            "indexer.k_proj",
            *CONVOLVED[1:],
            *OF_STREAMS,
        ],
    ),
    "r17-o-mlp": (
        17,
        8,
        ["o_proj", "out_proj", "o_proj@linear", "o_proj@sliding", "linear_out", "query_router", *MLP],
    ),
}


class TopKMargins(TorchFunctionMode):
    """Notes by how much the last score that an indexer chooses leads the first that it does not."""

    def __init__(self, margins: list[float]) -> None:
        super().__init__()
        self._margins = margins

    def begin(self, *_: Any) -> None:
        """Before the indexer runs."""
        self.__enter__()

    def end(self, *_: Any) -> None:
        """After it ran."""
        self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk and (count := args[1]) < args[0].shape[-1]:
            best = args[0].topk(count + 1, dim=-1).values
            led = (best[..., -2] - best[..., -1])[best[..., -1] > torch.finfo(best.dtype).min]
            self._margins += led.flatten().tolist()
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class Tiny:
    """A model with three adapters, and the same in transformers + peft."""

    model: Path
    adapters: dict[str, Path]
    load: Callable[[Path, dict[str, Path]], Any]
    """Returns the model with all adapters, or with one."""

    kept: KeptAnswers = field(default_factory=KeptAnswers)
    router_margins: list[float] = field(default_factory=list)
    """Of all choices of experts and of an indexer so far, empty for a model without them."""

    @cached_property
    def reference(self) -> Any:
        return self.watched(self.load(self.model, self.adapters))

    def watched(self, reference: Any) -> Any:
        """A reference whose choices of experts are noted."""
        for module in reference.modules():
            if type(module).__name__ == "DbrxFFN":
                module.router.top_k = module.top_k
            is_other = hasattr(module, "A_log") or hasattr(module, "temperature")  # gates of states, and of residuals
            if type(module).__name__.endswith(("Router", "Gate", "TopKGating")) and not is_other:
                module.register_forward_hook(self._note_router)
            if type(module).__name__.endswith("Indexer"):
                watched = TopKMargins(self.router_margins)
                module.register_forward_pre_hook(watched.begin)
                module.register_forward_hook(watched.end)
        return reference

    def _note_router(self, router: Any, inputs: tuple[Any, ...], output: Any) -> None:
        place = {"Llama4Router": 1, "JetMoeTopKGating": -1}.get(type(router).__name__, 0)  # scores of others may be 0
        scores = (output if isinstance(output, torch.Tensor) else output[place]).float()
        if (balances := getattr(router, "balancing_biases", None)) is not None:
            scores = scores.softmax(-1) + balances
        elif (corrected := getattr(router, "moe_statics", None)) is not None:
            scores = scores.softmax(-1) + corrected.e_score_correction_bias
        elif (correction := getattr(router, "e_score_correction_bias", (*inputs, None)[1])) is not None:
            scores = (scores.softmax(-1) if hasattr(router, "classifier") else scores.sigmoid()) + correction
        if (groups := getattr(router, "num_group", None) or 1) > 1:
            best_of = 1 if getattr(router, "topk_method", None) == "group_limited_greedy" else 2
            sums = scores.view(len(scores), groups, -1).topk(best_of).values.sum(-1)
            best = sums.topk(router.topk_group + 1)
            self.router_margins.append(float((best.values[:, -2] - best.values[:, -1]).min()))
            kept = torch.zeros_like(sums).scatter_(1, best.indices[:, :-1], 1).bool()
            scores = scores.masked_fill(~kept.repeat_interleave(scores.shape[1] // groups, 1), float("-inf"))
        if (jitter := getattr(router, "router_jitter_noise", None)) is not None:
            self._note_near(scores, 2 * jitter)
        if (most := getattr(router, "top_k", None) or router.config.top_k_experts) < scores.shape[-1]:
            best = scores.topk(most + 1).values
            self.router_margins.append(float((best[:, most - 1] - best[:, most]).min()))

    def _note_near(self, logits: torch.Tensor, most: float) -> None:
        """Note how clearly logits are near the best ones; see `Scoring.SPARSE_MIXER`."""
        for best in logits.topk(2).values.unbind(1):
            distance = (best[:, None] - logits) / logits.abs().maximum(best[:, None])
            self.router_margins.append(float((distance - most).abs().min()))

    def use(self, adapter: str | None) -> Any:
        """The reference with this adapter."""
        return switched(self.reference, adapter)

    @cache  # noqa: B019 - subjects are kept as long as the process
    def case(self, adapter: str | None, length: int, seed: int, count: int = 8) -> tuple[list[int], list[int]]:
        """A random prompt and its `count` greedy tokens, all clear choices."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            prompt = torch.randint(3, 150, (length,), generator=generator).tolist()
            tokens, margin, router_margin = self._answer(adapter, prompt, count)
            if margin >= MIN_MARGIN and router_margin >= MIN_ROUTER_MARGIN:
                return prompt, tokens

    def greedy(self, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], float]:
        """The reference's choices, and by how much the closest one leads."""
        tokens, margin, _ = self._answer(adapter, prompt, count)
        return tokens, margin

    def _answer(self, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], float, float]:
        """As `greedy`, and by how much the closest choice of an expert leads."""

        def compute() -> tuple[list[int], float, float]:
            self.router_margins.clear()
            tokens, margin = self._compute(adapter, prompt, count)
            return tokens, margin, min(self.router_margins, default=1.0)

        return self.kept.get([adapter, prompt, count], compute)

    def _compute(self, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], float]:
        """What `greedy` returns; the drafts are an engine's answers."""
        model = self.use(adapter)
        if _depends_on_length(model):
            return token_by_token(model, prompt, count)
        return after_drafts(partial(logits, model), partial(self.draft, adapter), prompt, count)

    def draft(self, adapter: str | None, prompt: list[int], count: int) -> list[int]:
        """The answer of an engine."""
        engine = self._engine
        if adapter is not None and adapter not in engine.store:
            engine.store.register(adapter, self.adapters[adapter])
        params = RequestParams(temperature=0.0, ignore_eos=True, max_tokens=count)
        engine.add_request(Request("draft", prompt, params, adapter))
        tokens = []
        while engine.has_work():
            tokens += [token for output in engine.step() for token in output.token_ids]
        return tokens

    @cached_property
    def _engine(self) -> Engine:
        config = EngineConfig(
            model=self.model, dtype="float32", memory_bytes=8 << 20, threads=1, device="cpu", prefix_cache=False
        )
        return Engine(config, open_executor(config), reads=InlineReads())


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of a reference `[len(tokens), vocab]`, without a cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def _depends_on_length(model: Any) -> bool:
    """True if the rotary embedding of a token depends on how long the text is when it is computed."""
    rope = repr(getattr(model.config, "rope_parameters", None))
    return any(kind in rope for kind in ("dynamic", "longrope"))


def randomise(model: torch.nn.Module) -> None:
    """Norms that are not one and biases that are not zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("altup.router_norm.weight"):
                parameter.uniform_(24, 72)
            elif ("norm" in name and ".mlp.fc" not in name) or ".ln_" in name or name.endswith("correct_output_scale"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("hc.scale", "hc_scale")):
                parameter.uniform_(0.1, 0.5)
            elif name.endswith("ple.conv1d.weight"):  # which begins with zeros
                parameter.normal_(0, 0.4)
            elif name.endswith(("states_bias", "residual_bias")):  # more would have all answers be alike
                parameter.normal_(0, 0.05)
            elif name.endswith(("states_scale", "residual_scale")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("hc.base", "hc_base")):
                parameter.normal_(0, 0.7)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.02 if "moe_statics" in name else 0.3)
            elif name.endswith("_gate_weight"):
                parameter.normal_(0, 0.3)
            elif name.endswith(("per_expert_scale", "global_scale")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("router.scale"):
                parameter.uniform_(8, 24)
            elif name.endswith(("sinks", "mamba.D", "mixer.D")):
                parameter.normal_()
            elif ".act_fn." in name:
                parameter.uniform_(-1, 1)
            elif name.endswith("forget_gate.A_log"):  # else most states would forget all but the last token
                parameter.uniform_(-5, 1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.3)
            elif name.endswith("balancing_biases"):  # transformers sets the last one to -1 when it loads a model
                buffer.normal_(-0.9, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)


COMMON = {
    "vocab_size": 150,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields that all geometries have unless they say otherwise."""


def new_model(name: str, changes: Mapping[str, Any]) -> Any:
    """A family's model in transformers, as that initialises it."""
    import transformers

    config_class, arguments, _ = EVERY[name]
    arguments = deepcopy({**COMMON, **arguments, **changes})  # configurations add to what they are given
    if config_class in BESIDE_TEXT:
        arguments = {"text_config": arguments, **deepcopy(BESIDE_TEXT[config_class])}
    config = getattr(transformers, config_class)(**arguments)
    own = OF_CLASSES.get(config_class)
    return getattr(transformers, own)(config) if own else transformers.AutoModelForCausalLM.from_config(config)


def save_family(name: str, path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    config_class, _, shard = EVERY[name]
    torch.manual_seed(sum(map(ord, name)))
    model = new_model(name, changes)
    randomise(model)
    model.to(dtype).save_pretrained(path, max_shard_size=shard)
    _name_class(path, config_class)


def save_config(name: str, path: Path, changes: Mapping[str, Any]) -> None:
    """The configuration of a model, without weights."""
    with torch.device("meta"):
        model = new_model(name, changes)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    _name_class(path, EVERY[name][0])


def _name_class(path: Path, config_class: str) -> None:
    if config_class in BY_ANOTHER:
        config = path / "config.json"
        raw = json.loads(config.read_text())
        config.write_text(json.dumps({**raw, "architectures": [BY_ANOTHER[config_class]]}))


def load_model(path: Path, **arguments: Any) -> Any:
    """A checkpoint in transformers."""
    import transformers

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    by = getattr(transformers, name) if name in OF_CLASSES.values() else transformers.AutoModelForCausalLM
    return by.from_pretrained(path, **arguments)


def train_vectors(model: torch.nn.Module) -> None:
    """Change magnitudes and biases that are trained, which PEFT begins with those of the base model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if "lora_magnitude_vector" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))


def _paths(config: ModelConfig, layer: int, targets: Collection[str]) -> list[str]:
    """Paths of some projections in a layer."""
    return [path for path, modules in config.module_paths.in_layer(layer).items() if set(modules) & set(targets)]


def without_conversion() -> AbstractContextManager[Any]:
    """PEFT takes names of projections as they are: it would take gate_proj of a dense layer for that of experts."""
    conversion = "peft.utils.transformers_weight_conversion.get_checkpoint_conversion_mapping"
    return patch(conversion, lambda *_: None)


def make_tiny(name: str, changes: Mapping[str, Any] | None = None, **arguments: Any) -> Tiny:
    """A family's model with ADAPTERS. changes: to its configuration. arguments: further ones of `LoraConfig`."""
    others = json.dumps([changes, arguments], sort_keys=True)
    key = f" {hashlib.sha256(others.encode()).hexdigest()[:8]}" * bool(changes or arguments)
    root = kept_files(f"tiny {name}{key}", lambda root: save_tiny(name, root, changes or {}, **arguments))
    return Tiny(root / "model", {adapter: root / adapter for adapter in ADAPTERS}, load_peft, KeptAnswers(root))


@quiet()
@without_conversion()
def load_peft(path: Path, adapters: dict[str, Path]) -> Any:
    """The model with these adapters in transformers + peft, in float32."""
    from peft import PeftModel

    model: Any = load_model(path, dtype=torch.float32)
    for adapter, path in adapters.items():
        if isinstance(model, PeftModel):
            model.load_adapter(path, adapter_name=adapter)
        else:
            model = PeftModel.from_pretrained(model, path, adapter_name=adapter)
    return model.eval()


@without_conversion()
def save_tiny(name: str, root: Path, changes: Mapping[str, Any], **arguments: Any) -> None:
    """Save a family's model, and ADAPTERS."""
    from peft import LoraConfig, get_peft_model

    save_family(name, root / "model", **changes)
    config = read_model_config(root / "model")
    paths, base = config.module_paths.by_path, load_model(root / "model")
    for seed, (adapter, (rank, alpha, targets)) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        here = [path.rpartition(".")[2] for path, modules in paths.items() if set(modules) & set(targets)]
        here = [path for path in here if not (path == "out_proj" and name.startswith(NO_OUT_PROJ))] or ["in_proj"]
        if config.experts is not None or any(layer.invocation is not None for layer in config.layers):
            own = set(targets) - {"out_proj" * name.startswith(NO_OUT_PROJ)}
            every = ((layer, path) for layer in range(config.num_layers) for path in _paths(config, layer, own))
            here = [config.module_paths.name_in(*each) for each in every]
        lora = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=here,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            **arguments,
        )
        trained = get_peft_model(deepcopy(base), lora)
        train_vectors(trained)
        trained.save_pretrained(root / adapter)


def make_all_linear(name: str, **arguments: Any) -> Tiny:
    """A family's model with one adapter, "all", on what PEFT's "all-linear" reaches. arguments: see `make_tiny`."""
    key = f" {hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:8]}" * bool(arguments)
    root = kept_files(f"all-linear {name}{key}", lambda root: _save_all_linear(name, root, arguments))
    return Tiny(root / "model", {"all": root / "all"}, load_peft, KeptAnswers(root))


def _save_all_linear(name: str, root: Path, arguments: Mapping[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    save_family(name, root / "model")
    torch.manual_seed(0)
    lora = LoraConfig(
        r=4,
        lora_alpha=9,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **arguments,
    )
    trained = get_peft_model(load_model(root / "model"), lora)
    train_vectors(trained)
    trained.save_pretrained(root / "all")
