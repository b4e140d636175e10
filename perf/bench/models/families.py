"""Fields of `config.json` that make another family of a geometry of Llama's shape, for `--family`.

Tests: tests/perf/bench/models/test_sizes.py
"""

from __future__ import annotations

from typing import Any

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def fields_of(family: str, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """What replaces Llama's fields. Windows are of 512 tokens, in as many layers as the family's models have them."""
    every = {"gemma-2": 2, "gemma-3": 6, "exaone-4": 4, "cohere-2": 4, "gpt-oss": 2}.get(family)
    fields: dict[str, Any] = {"head_dim": head_dim, **FAMILIES[family]}
    if "kv_lora_rank" in fields or family == "diffllama":  # latents serve all heads, and values are of two
        fields["num_key_value_heads"] = heads
    if family == "lfm2":
        kinds = ["full_attention" if layer % 3 == 2 else "conv" for layer in range(layers)]
        fields |= {"layer_types": kinds}
    if family == "nemotron-h":  # each layer is one part
        fields["hybrid_override_pattern"] = ("M-M-M*-" * layers)[:layers]
    if family == "nemotron-3-super":
        fields["hybrid_override_pattern"] = ("MEME*E" * layers)[:layers]
    if family in ("zamba", "zamba-2"):
        fields["layers_block_type"] = ["hybrid" if layer % 3 == 2 else "linear_attention" for layer in range(layers)]
    if family == "zamba-2":  # a block's input is the layer's beside the embeddings
        fields["head_dim"] = 2 * head_dim
    if family == "gpt-neo":
        fields["attention_types"] = [[["global", "local"], layers // 2]]
    if family == "mamba-2":
        fields["num_heads"] = 2 * heads * head_dim // 64
    if family == "inkling":
        own = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
        fields |= {f"swa_{name}": value for name, value in own.items()}
    if every is not None:
        kinds = [_GLOBAL if layer % every == every - 1 else _LOCAL for layer in range(layers)]
        fields |= {"sliding_window": 512, "layer_types": kinds}
    return fields


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 8.0,
    },
    "phi-3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 4},
    "olmo-2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "glm-4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    "gemma-2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "query_pre_attn_scalar": 64},
    "gemma-3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "query_pre_attn_scalar": 64},
    "exaone-4": {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"},
    "cohere-2": {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "logit_scale": 0.25},
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "lfm2": {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": False},
    "nemotron-h": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
    },
    "mamba": {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
    "jamba": {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
    },
    "inkling": {
        "architectures": ["InklingForCausalLM"],
        "model_type": "inkling_text",
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 224,
    },
    "zamba-2": {
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        "n_mamba_heads": 32,
        "tie_word_embeddings": True,  # as blocks are
        "num_mem_blocks": 2,
        "use_mem_rope": True,
        "adapter_rank": 64,
    },
    "qwen4-exp": {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "hc_lowrank": 64,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 20_000,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 512,
        "indexer_compress_ratio": 16,
    },
    "zaya": {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "num_experts": 8,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 1024,
        "router_hidden_size": 128,
    },
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
    },
    "starcoder-2": {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
    },
    "phi-2": {"architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new"},
    "nemotron": {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2"},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3.5-moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 224,
        "shared_expert_intermediate_size": 256,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "attention_bias": True,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 224,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "head_dim": 32,
    },
}
_MIXTURE = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
_LATENT_MIXTURE = {name: each for name, each in FAMILIES["deepseek-v3"].items() if name != "model_type"}
_INDEXER = {"index_topk": 512, "index_head_dim": 64, "index_n_heads": 8}
_OF_INDEXER = {**_LATENT_MIXTURE, **_INDEXER}

#: Mixtures, most of them over latents, and some with an indexer.
FAMILIES |= {
    "deepseek-v3.2": {**_OF_INDEXER, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "glm-5": {
        **_OF_INDEXER,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "index_topk_freq": 4,
    },
    "hy-v4": {**_OF_INDEXER, "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4"},
    "ax-k1": {**_LATENT_MIXTURE, "architectures": ["AXK1ForCausalLM"], "model_type": "axk1"},
    "mistral-4": {**_LATENT_MIXTURE, "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"},
    "ax-k2": {
        **_OF_INDEXER,
        "architectures": ["AXK2ForCausalLM"],
        "model_type": "axk2",
        "gated_norm_rank": 16,
    },
    "longcat-flash": {
        **_LATENT_MIXTURE,
        "architectures": ["LongcatFlashForCausalLM"],
        "model_type": "longcat_flash",
        "zero_expert_num": 32,
        "moe_topk": 8,
        "expert_ffn_hidden_size": 224,
    },
    "ling-2.6": {
        **_LATENT_MIXTURE,
        **_MIXTURE,
        "architectures": ["BailingHybridForCausalLM"],
        "model_type": "bailing_hybrid",
        "q_lora_rank": None,
        "layer_group_size": 4,
        "head_dim": 64,
        "num_shared_experts": 1,
    },
    "dots-3": {
        **_OF_INDEXER,
        "architectures": ["Dots3NoteForCausalLM"],
        "model_type": "dots3_note_text",
        "swa_q_lora_rank": 384,
        "swa_kv_lora_rank": 256,
        "swa_head_dim": 96,
        "swa_qk_nope_head_dim": 64,
        "swa_v_head_dim": 64,
        "sliding_window": 512,
    },
    "minimax-m3": {
        "architectures": ["MiniMaxM3VLForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 256,
        "dense_intermediate_size": 2048,
        "shared_intermediate_size": 256,
        "partial_rotary_factor": 0.5,
        "index_head_dim": 64,
        "index_n_heads": 4,
        "index_block_size": 64,
    },
    "step-3.7": {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p7",
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "share_expert_dim": 256,
        "sliding_window": 512,
    },
    "muse-spark": {
        "architectures": ["MuseSparkForConditionalGeneration"],
        "model_type": "muse_spark",
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "moe_hidden_size": 256,
        "sliding_window": 512,
    },
    "glm-5.3-flash": {
        **_OF_INDEXER,
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": {"model_type": "glm5_next_text"},  # its text part has all the other fields
        "qk_rope_head_dim": 0,
        "linear_num_heads": 8,
        "linear_head_dim": 64,
    },
    "laguna": {
        **_MIXTURE,
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "shared_expert_intermediate_size": 256,
        "gating": "per-head",
    },
    "nemotron-3-super": {
        **FAMILIES["nemotron-h"],
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512,
        "moe_latent_size": 256,
    },
    "jetmoe": {
        "architectures": ["JetMoeForCausalLM"],
        "model_type": "jetmoe",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "dbrx": {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 512},
    },
}

#: The classics, with LayerNorms, and models without attention, or with little.
FAMILIES |= {
    "gpt-2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
    "gpt-neo": {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo"},
    "gpt-j": {"architectures": ["GPTJForCausalLM"], "model_type": "gptj"},
    "persimmon": {"architectures": ["PersimmonForCausalLM"], "model_type": "persimmon", "hidden_act": "relu2"},
    "bitnet": {"architectures": ["BitNetForCausalLM"], "model_type": "bitnet"},
    "opt": {"architectures": ["OPTForCausalLM"], "model_type": "opt"},
    "bloom": {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
    "mpt": {"architectures": ["MptForCausalLM"], "model_type": "mpt"},
    "falcon": {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "new_decoder_architecture": True},
    "diffllama": {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"},
    "mamba-2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
    },
    "falcon-mamba": {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"},
    "zamba": {"architectures": ["ZambaForCausalLM"], "model_type": "zamba"},
    "recurrent-gemma": {"architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma"},
}
"""Of each family."""
