"""`config.json` in old and new spellings, of 20 real models, and wrong in every way we could think of."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chorus.core.model.families.registry import FAMILIES
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.attention import HeadNorm, LatentSpec, TemperatureTuning
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import ClampedSwiglu, Experts, Routing, Scoring
from chorus.core.model.specs.recurrent import GatedDeltaSpec
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.tensor_parts import parts_of, tensor_shapes

from ...published_configs import PUBLISHED
from ...tiny_families import BY_ANOTHER

pytestmark = pytest.mark.wide

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GEMMA_4 = {"architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "hidden_size_per_layer_input": 0}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope_of(config):
    return config.attention.rope


@pytest.fixture
def read(tmp_path):
    """`read(field=value, …)`: the configuration of LLAMA with changes; `...` as a value removes the field."""

    def make(**changes):
        raw = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_model_config(tmp_path)

    return make


# -- spellings


@pytest.mark.parametrize("type_field", ["rope_type", "type"])
def test_old_and_new_spelling_of_rope_are_the_same(read, type_field):
    scaling = {type_field: "llama3", **LLAMA3_SCALING}
    new = read(rope_parameters={**scaling, "rope_theta": 500000})
    old = read(rope_theta=500000.0, rope_scaling=scaling)
    assert new == old
    assert rope_of(new) == RopeConfig(16, 500000.0, "llama3", factor=8.0, original_max_position_embeddings=64)
    plain = read(rope_theta=1e6, rope_scaling=None)
    assert rope_of(plain) == RopeConfig(16, 1e6)
    assert plain == read(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert rope_of(read()) == RopeConfig(16, 10000.0)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 1000000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING, "original_max_position_embeddings": 8192},
        {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING, "factor": 32.0},
        {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.5, "low_freq_factor": 0.7, "high_freq_factor": 9.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "yarn",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 4.0,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 0.5,
        },
    ],
)
def test_frequencies_equal_transformers_bit_for_bit(read, rope, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=head_dim, rope_parameters=dict(rope), max_position_embeddings=512)
    want = LlamaRotaryEmbedding(config)
    own = rope_of(read(rope_parameters=rope, head_dim=head_dim))
    assert torch.equal(own.inverse_frequencies(), want.inv_freq)
    assert want.attention_scaling == own.attention_factor


TEXT_ONLY = [name for name, family in FAMILIES.items() if not family.tensors.left_out]
TEXT_ONLY += ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "MiMoV2FlashForCausalLM"]
TEXT_ONLY += ["Dots3NoteForCausalLM", "MiniMaxM3VLForCausalLM"]
for name in ("PhiMoEForCausalLM", "MPTForCausalLM"):  # no class of transformers has these names, which checkpoints have
    TEXT_ONLY.remove(name)
SHAPES = {"hidden_size": 256, "num_attention_heads": 64, "num_hidden_layers": 8}
#: Further shapes, of families whose defaults are none, or don't fit SHAPES.
OWN_SHAPES = {
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 0, "layer_types": ["attention"] * 8},
    "BambaForCausalLM": {"attn_layer_indices": [0], "mamba_n_heads": 8},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "HeliumForCausalLM": {"num_attention_heads": 20},
    "Zamba2ForCausalLM": {"num_hidden_layers": 54},
    "GPTNeoXForCausalLM": {"hidden_size": 512},
    "Emu3ForCausalLM": {"pad_token_id": 0},
    "GPTNeoForCausalLM": {"num_hidden_layers": 24},
    "GPTJForCausalLM": {"num_attention_heads": 4},
    "CodeGenForCausalLM": {"num_attention_heads": 4},
    "YoutuForCausalLM": {"num_key_value_heads": 64},
    "MiniCPM3ForCausalLM": {"num_key_value_heads": 64},
    "StableLmForCausalLM": {"num_attention_heads": 32, "hidden_size": 256},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 64},
    "DeepseekV32ForCausalLM": {"num_key_value_heads": 64},
    "AXK2ForCausalLM": {"num_key_value_heads": 64},
    "Dots3NoteForCausalLM": {"num_key_value_heads": 64},
    "Glm4MoeLiteForCausalLM": {"num_key_value_heads": 64},
    "KimiLinearForCausalLM": {"num_key_value_heads": 64},
    "BailingHybridForCausalLM": {"num_key_value_heads": 64},
    "GPTNeoXJapaneseForCausalLM": {"num_attention_heads": 4},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": None}},
    "BloomForCausalLM": {"num_attention_heads": 16},
    "MptForCausalLM": {"num_attention_heads": 16},
    "PersimmonForCausalLM": {"num_attention_heads": 16},
    "Mistral4ForCausalLM": {"num_key_value_heads": 64},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "BitNetForCausalLM": {"num_attention_heads": 20, "hidden_size": 240},
}


@pytest.mark.parametrize("architecture", TEXT_ONLY)
def test_defaults_are_those_of_transformers(tmp_path, architecture):
    """Shapes alone describe the same model as these shapes with all other fields of transformers' configuration."""
    import transformers

    by_another = next((config for config, name in BY_ANOTHER.items() if name == architecture), None)
    config_class = getattr(transformers, by_another) if by_another else getattr(transformers, architecture).config_class
    shapes = {**SHAPES, **OWN_SHAPES.get(architecture, {})}
    full = {**config_class(**{"pad_token_id": None, **shapes}).to_dict(), "architectures": [architecture]}
    if full.get("head_dim") is None:
        full.pop("head_dim", None)
    tokens = {"bos_token_id": None, "eos_token_id": None}
    vocabulary = {name: full[name] for name in ("vocab_size", "intermediate_size") if name in full}
    (tmp_path / "config.json").write_text(json.dumps({**full, **tokens}, default=str))
    want = read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **shapes, **vocabulary}))
    assert read_model_config(tmp_path) == want


@pytest.mark.parametrize(
    ("changes", "has_lm_head", "is_classifier"),
    [
        ({}, True, False),
        ({"architectures": ["LlamaForSequenceClassification"]}, False, True),
        ({"architectures": ["LlamaModel"]}, False, False),
        ({"architectures": ["Llama4TextModel"]}, False, False),
        ({"architectures": ["PhimoeModel"], "lm_head_bias": True}, False, False),
        (
            {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": ["no", "yes"]},
            True,
            False,
        ),
    ],
)
def test_heads_by_architecture(read, changes, has_lm_head, is_classifier):
    config = read(**changes)
    assert (config.has_lm_head, config.is_classifier) == (has_lm_head, is_classifier)
    assert config.tie_word_embeddings == (not has_lm_head), "no output projection is looked for"
    assert has_lm_head or "lm_head.bias" not in tensor_shapes(config)
    assert config.architecture == changes.get("architectures", ["LlamaForCausalLM"])[0]


def test_a_null_switch_is_off_where_the_default_is_on(read):
    """As in transformers, of families whose class takes it: null is no missing field."""
    latent = {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "num_key_value_heads": 4, "n_group": 1}
    latent |= {"first_k_dense_replace": 0, "topk_group": 1, "moe_intermediate_size": 32}
    assert read(**latent).experts.routing.renormalised
    assert not read(**latent, norm_topk_prob=None).experts.routing.renormalised
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings is None: transformers takes no null here"):
        read(architectures=["Cohere2ForCausalLM"], tie_word_embeddings=None)


def test_scores_have_the_usual_scale_where_granites_is_null(read):
    """As in transformers, where 1 is the default of a missing field."""
    assert read(architectures=["GraniteForCausalLM"], head_dim=16).attention.scale == 1.0
    clova = {"architectures": ["HyperCLOVAXForCausalLM"], "head_dim": 16}
    assert read(**clova, attention_multiplier=None).attention.scale == 0.25


def test_head_counts_and_dims(read):
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(head_dim=24).q_size == 96
    assert read(head_dim=None).head_dim == 16
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128


def flags_of(config):
    mixer = config.layers[0].mixer
    return mixer.qkv_bias, mixer.o_bias, config.layers[0].feed_forward.bias, mixer.head_norm is HeadNorm.EACH


def test_biases_and_norms_by_architecture(read):
    def flags(**changes):
        return flags_of(read(attention_bias=True, mlp_bias=True, sliding_window=None, **changes))

    assert flags() == (True, True, True, False)
    assert flags(architectures=["MistralForCausalLM"]) == (False, False, False, False)
    assert flags(architectures=["Qwen2ForCausalLM"]) == (True, False, False, False)
    assert flags(architectures=["Qwen3ForCausalLM"]) == (True, True, False, True)
    assert flags(architectures=["SeedOssForCausalLM"]) == (True, False, True, False)
    silent = read(architectures=["SeedOssForCausalLM"], attention_out_bias=True)
    assert flags_of(silent) == (True, True, False, False)
    assert not any(flags_of(read()))


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, 100),
        ({"architectures": ["MistralForCausalLM"]}, 4096),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 100}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 100,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            100,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            100,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 2,
                "max_window_layers": 0,
            },
            None,
        ),
    ],
)
def test_windows_of_layers(read, changes, window):
    config = read(**changes)
    assert config.window == window
    assert config.max_context == 512


def test_layers_of_several_kinds(read):
    assert [
        layer.mixer.window
        for layer in read(
            architectures=["Qwen2ForCausalLM"], sliding_window=100, use_sliding_window=True, max_window_layers=1
        ).layers
    ] == [None, 100]
    gemma = read(
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=7,
        sliding_window=9,
        rope_theta=5e5,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        head_dim=16,
    )
    assert [layer.mixer.window for layer in gemma.layers] == [9, 9, 9, 9, 9, None, 9]
    assert {layer.mixer.rope for layer in gemma.layers[:5]} == {RopeConfig(16, 10000.0)}
    assert gemma.layers[5].mixer.rope == RopeConfig(16, 5e5, "linear", factor=8.0)
    smol = read(architectures=["SmolLM3ForCausalLM"], num_hidden_layers=5)
    assert [layer.mixer.rope is None for layer in smol.layers] == [False, False, False, True, False]


def test_attention_of_several_shapes(read):
    """The published form of Gemma 4 of 31B, with fewer layers."""
    types = ["sliding_attention"] * 5 + ["full_attention"]
    config = read(
        architectures=["Gemma4ForConditionalGeneration"],
        text_config={
            "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 6, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4,
            "attention_k_eq_v": True, "attention_bias": False, "enable_moe_block": False, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 30.0, "sliding_window": 1024, "vocab_size": 262144, "dtype": "bfloat16",
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "layer_types": types,
            "hidden_activation": "gelu_pytorch_tanh", "vocab_size_per_layer_input": 262144,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    )  # fmt: skip
    local, full = config.attention_shapes
    assert (*local.kv_shape[:2], local.window, local.rope) == (16, 256, 1024, RopeConfig(256, 10000.0))
    assert (*full.kv_shape[:2], full.window, full.rope) == (
        4,
        512,
        None,
        RopeConfig(512, 1e6, "proportional", pairs=64),
    )
    assert (full.keys_are_values, local.keys_are_values, local.scale, full.scale) == (True, False, 1.0, 1.0)
    assert config.projections["q_proj@full"].dims == (5376, 16384)
    assert config.module_paths.in_layer(5)["self_attn.q_proj"] == ("q_proj@full",)
    assert "self_attn.v_proj" not in config.module_paths.in_layer(5)
    assert config.module_paths.in_layer(4)["self_attn.v_proj"] == ("v_proj",)
    assert config.module_paths.names.count("q_proj") == 1


def test_layers_of_both_types_may_have_one_shape(read):
    """transformers writes an empty `per_layer_config`, and no `global_head_dim`, where no layer differs."""
    config = read(**GEMMA_4, layer_types=["sliding_attention", "full_attention"], per_layer_config={})
    assert [shape.kv_shape[:2] for shape in config.attention_shapes] == [(2, 16)] * 2


@pytest.mark.parametrize("field", ["num_heads", "num_kv_heads", "head_dim"])
def test_layers_of_different_shapes_are_refused(read, field):
    config = read()
    other = replace(config.layers[0], mixer=replace(config.layers[0].mixer, **{field: 1}))
    with pytest.raises(UnsupportedModel, match="layers of different shapes are not supported"):
        replace(config, layers=(config.layers[0], other))
    wider = replace(config.layers[0], feed_forward=replace(config.layers[0].feed_forward, size=8))
    with pytest.raises(UnsupportedModel, match="layers of different shapes are not supported"):
        replace(config, layers=(config.layers[0], wider))


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
}  # fmt: skip
GLM = {**EXPERTS, "architectures": ["Glm4MoeForCausalLM"], "num_experts": ..., "n_routed_experts": 16}


def test_layers_have_experts_or_not(read):
    config = read(**EXPERTS, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=True)
    assert [layer.experts is not None for layer in config.layers] == [False, True, False, False, False, True]
    assert config.experts == Experts(16, 40, Routing(3, renormalised=True))
    assert (config.num_experts, config.intermediate_size) == (16, 96)
    assert config.projections.layers_of("gate_proj") == (0, 2, 3, 4)
    assert read(**EXPERTS).intermediate_size == 3 * 40, "what a token uses"
    glm = read(**GLM, num_hidden_layers=3, first_k_dense_replace=2, n_shared_experts=2)
    assert [layer.experts is not None for layer in glm.layers] == [False, False, True]
    assert glm.experts.shared_size == 80
    assert glm.tensors.left_out == ("model.layers.3.",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**EXPERTS, "num_experts_per_tok": 17}, r"num_experts_per_tok is 17: num_experts is 16"),
        ({**EXPERTS, "num_experts": 0}, r"num_experts is 0: a whole number of at least 1"),
        ({**EXPERTS, "mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]: a list of whole numbers"),
        ({**EXPERTS, "decoder_sparse_step": 0}, r"decoder_sparse_step is 0"),
        ({**EXPERTS, "hidden_act": "relu"}, r"hidden_act is 'relu': not supported"),
        ({**EXPERTS, "architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, r"clip_qkv is 8.0: .*only null"),
        (
            {**EXPERTS, "architectures": ["Ernie4_5_MoeForCausalLM"], "moe_norm_min": 0.5},
            r"moe_norm_min is 0.5: weights are divided by their sum",
        ),
        (
            {**EXPERTS, "architectures": ["Qwen2MoeForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            r"layer_types is .*: sliding_attention needs use_sliding_window true",
        ),
        ({**GLM, "n_group": 3}, r"n_group is 3: n_routed_experts, 16, is not divisible by it"),
        ({**GLM, "n_group": 2, "topk_group": 3}, r"topk_group is 3: n_group is 2"),
    ],
)
def test_experts_that_are_not_computed_as_transformers_does_are_refused(read, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(**changes)


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 3,
    "attention_bias": True,
    "hidden_act": "silu",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "swiglu_limit": 7.0,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
}


def test_gpt_oss_as_its_checkpoints_describe_it(read):
    """What a file of an older transformers leaves out is what its own class assumes."""
    config = read(**GPT_OSS)
    assert config.experts == Experts(
        32, 96, Routing(4, Scoring.SOFTMAX_OF_CHOSEN, bias=True), ClampedSwiglu(1.702, 7.0), biased=True
    )
    assert [layer.attention.window for layer in config.layers] == [128, None, 128]
    assert all(it.sinks and it.qkv_bias and it.o_bias for it in config.attention_layers)
    silent = dict.fromkeys(("rope_scaling", "rope_theta", "layer_types", "sliding_window", "swiglu_limit"), ...)
    assert read(**{**GPT_OSS, **silent}).layers == config.layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 0}, r"swiglu_limit is 0: a finite number above 0"),
        ({"swiglu_alpha": "1.7"}, r"swiglu_alpha is '1.7': a finite number above 0"),
        ({"num_experts_per_tok": 33}, r"num_experts_per_tok is 33: num_local_experts is 32"),
        ({"layer_types": ["full_attention"]}, r"layer_types is .*: 1 types for num_hidden_layers, 3"),
    ],
)
def test_wrong_fields_of_gpt_oss(read, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(**{**GPT_OSS, **changes})


#: Scout's text part, with fewer and smaller layers.
LLAMA_4 = {
    "architectures": ["Llama4ForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 64,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "floor_scale": 32,
    "for_llm_compressor": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "interleave_moe_layer_step": 1,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_jitter_noise": 0.0,
    "use_qk_norm": True,
}


def test_llama_4_as_its_checkpoints_describe_it(read):
    config = read(**LLAMA_4)
    mixers = config.attention_layers
    routing = Routing(1, Scoring.SIGMOID_OF_CHOSEN, of_inputs=True)
    assert {layer.feed_forward for layer in config.layers} == {Experts(16, 40, routing, shared_size=40)}
    assert [(it.window, it.chunked) for it in mixers] == [(64, True)] * 3 + [(None, False)]
    assert [it.head_norm for it in mixers] == [HeadNorm.BARE] * 3 + [None]
    assert [it.log_scaling for it in mixers] == [None] * 3 + [TemperatureTuning(0.1, 32, first=1)]
    assert mixers[0].rope.interleaved
    assert mixers[3].rope is None
    want = torch.tensor([1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2)])
    torch.testing.assert_close(mixers[3].log_scaling.factors(34)[[30, 31, 33]], want)
    assert mixers[0].rope.inverse_frequencies().isfinite().all()
    maverick = read(**{**LLAMA_4, "moe_layers": [1, 3], "use_qk_norm": False, "rope_scaling": None})
    assert [layer.feed_forward.size for layer in maverick.layers] == [80, 40, 80, 40]
    assert {it.head_norm for it in maverick.attention_layers} == {None}
    same = read(**{**LLAMA_4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_scaling": None})
    assert same.layers == maverick.layers
    whole = read(**{**LLAMA_4, "attention_chunk_size": None, "attn_temperature_tuning": False})
    assert {(it.window, it.log_scaling) for it in whole.attention_layers} == {(None, None)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4}, "attention_chunk_size is None: "),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention is not supported; supported: full_attention, "),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]: 2 values for num_hidden_layers, 4"),
        ({"num_experts_per_tok": 17}, "num_local_experts is 16; it can't be more than that"),
        ({"moe_layers": [-1]}, "moe_layers is .*whole numbers of at least 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: transformers leaves it out"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            "use_qk_norm is True: heads are normalised with ropes that",
        ),
    ],
)
def test_wrong_fields_of_llama_4(read, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(**{**LLAMA_4, **changes})


PHI_MOE = {
    "architectures": ["PhiMoEForCausalLM"],
    "attention_bias": True,
    "hidden_act": "silu",
    "input_jitter_noise": 0.01,
    "lm_head_bias": True,
    "model_type": "phimoe",
    "num_experts_per_tok": 2,
    "num_local_experts": 16,
    "original_max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [2.0] * 8,
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 128,
        "short_factor": [1.5] * 8,
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
}


def test_phi_moe_as_its_checkpoints_describe_it(read):
    """transformers scales cos and sin by fields of their own, and has the short factors at every length."""
    config = read(**PHI_MOE)
    assert config.experts == Experts(16, 96, Routing(2, Scoring.SPARSE_MIXER, jitter=0.01))
    assert config.head_bias
    assert config.norm.biased
    assert config.attention.qkv_bias
    assert config.attention.o_bias
    rope = rope_of(config)
    assert rope.attention_factor == 1.243163121016122
    assert torch.equal(rope.inverse_frequencies(128), rope.inverse_frequencies(129))
    assert (config.max_context, config.max_position_embeddings) == (128, 512)
    scaling = {**PHI_MOE["rope_scaling"], "long_mscale": 1.3}
    assert read(**{**PHI_MOE, "rope_scaling": scaling}).max_position_embeddings == 128
    assert rope_of(read(**{**PHI_MOE, "rope_scaling": None})) == RopeConfig(16, 10000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1: transformers always chooses 2"),
        ({"num_local_experts": 1}, "num_local_experts is 1"),
        ({"router_jitter_noise": -0.1}, "router_jitter_noise is -0.1: a number of at least 0"),
        (
            {"rope_scaling": {**PHI_MOE["rope_scaling"], "short_mscale": None}},
            "short_mscale is None: transformers",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "not supported; supported: default, longrope"),
    ],
)
def test_wrong_fields_of_phi_moe(read, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(**{**PHI_MOE, **changes})


def test_ranks_share_a_norm_of_all_heads(read):
    """Where there are more ranks than K/V heads, several have the same weights of keys."""
    olmo = read(architectures=["Olmo2ForCausalLM"])
    dim = olmo.head_dim
    assert (olmo.num_heads, olmo.num_kv_heads) == (4, 2)
    assert [Shard(0, size).config(olmo).attention.kv_copies for size in (1, 2, 4)] == [1, 1, 2]
    for name, first in (("q_norm", 2 * dim), ("k_norm", dim)):
        whole = f"model.layers.0.self_attn.{name}.weight"
        assert parts_of(olmo)[whole].share(2, 4) == ((slice(first, first + dim),),)
    each = read(architectures=["Qwen3ForCausalLM"])
    assert parts_of(each)["model.layers.0.self_attn.q_norm.weight"].share(1, 2) == ((),)


def test_longrope_ends_by_default_where_its_frequencies_change(read):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = read(
        architectures=["Phi3ForCausalLM"],
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", **factors},
    )
    assert phi.max_context == 128


def test_token_ids_come_from_the_generation_configuration_first(read, tmp_path):
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read(eos_token_id=[7, 8], bos_token_id=0).eos_token_ids == (7, 8)
    assert read(bos_token_id=0).bos_token_id == 0
    assert read().bos_token_id is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert read(eos_token_id=7).eos_token_ids == (9, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(eos_token_id=7).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json: eos_token_id is '</s>'"):
        read()


def test_fields_that_published_checkpoints_have_under_names_of_their_own(read):
    """MiniMax-M2's part of a head that rotates, Hunyuan's NTK-aware rope and lists, ERNIE's layers with experts."""
    minimax = read(architectures=["MiniMaxM2ForCausalLM"], head_dim=128, rotary_dim=64)
    assert rope_of(minimax).dim == 64
    hunyuan = {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "rope_theta": 10000.0}
    rope = rope_of(read(architectures=["HunYuanDenseV1ForCausalLM"], head_dim=128, **hunyuan))
    assert (rope.type, rope.theta) == ("default", 10000.0 * 1000.0 ** (128 / 126))
    experts = read(architectures=["HunYuanMoEV1ForCausalLM"], num_experts=64, moe_topk=[8, 8]).experts
    assert (experts.count, experts.routing.per_token) == (64, 8)
    ernie = {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1, "num_hidden_layers": 4}
    layers = read(architectures=["Ernie4_5_MoeForCausalLM"], **ernie).layers
    assert [layer.experts is not None for layer in layers] == [False, True, True, False]


# -- refusals

WRONG = [
    *(
        ({name: ...}, f"{name} is missing")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ),
    ({"hidden_size": "64"}, "hidden_size is '64': a whole number"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"vocab_size": 0}, "vocab_size is 0: a whole number of at least 1"),
    ({"num_hidden_layers": [2]}, "num_hidden_layers is [2]"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3: num_attention_heads, 4"),
    ({"head_dim": 15}, "head_dim is 15"),
    ({"head_dim": -2}, "head_dim is -2"),
    ({"hidden_size": 12}, "head_dim is 3"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny': a finite number above 0"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': true or false"),
    ({"attention_bias": 1}, "attention_bias is 1"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn': not supported; supported: float32"),
    ({"dtype": "auto"}, "dtype is 'auto'"),
    ({"bos_token_id": "<s>"}, "bos_token_id is '<s>'"),
    ({"eos_token_id": [1, None]}, "eos_token_id is [1, None]"),
    ({"hidden_act": "relu"}, "hidden_act is 'relu': not supported; supported: silu, gelu_pytorch_tanh"),
    (
        {"quantization_config": {"bits": 4}},
        "quantization_config.quant_method is missing: not supported",
    ),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM': a list"),
    ({"architectures": ["FalconForCausalLM"], "alibi": True}, "alibi is True: ALiBi is not supported"),
    (
        {"architectures": ["OPTForCausalLM"], "do_layer_norm_before": False},
        "do_layer_norm_before is False: norms",
    ),
    (
        {"architectures": ["GPTNeoForCausalLM"], "attention_types": [[["global"], 10**12]]},
        "attention_types is",
    ),
    ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM is not supported; supported: AXK1ForCausalLM, A"),
    ({"architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM is not supported: its recurrence is not computed"),
    ({"architectures": ["DeepseekOcr2ForConditionalGeneration"]}, "is not supported: adapters on its embeddings gave"),
    ({"architectures": []}, "architecture none named is not supported"),
    ({"architectures": ...}, "architecture none named is not supported"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear': an object"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling.type is 'ntk': rope type not supported"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.short_factor is [1.0]: 1 factors"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}},
        "rope_scaling.long_factor is [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]: 7 factors, one is needed for each of 8",
    ),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}},
        "rope_scaling.long_factor is missing: 0 factors",
    ),
    ({"rope_scaling": {"type": "longrope", "short_factor": "1"}}, "rope_scaling.short_factor is '1': a list of finite"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "factor": None}}, "rope_scaling.factor is None"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 0.5}}, "it must not be below"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention is"),
    (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5: transformers leaves it out for this family",
    ),
    (
        {"architectures": ["PhiForCausalLM"], "partial_rotary_factor": 0.45},
        "partial_rotary_factor is 0.45: it makes 7 of 16 elements",
    ),
    (
        {"architectures": ["PhiForCausalLM"], "partial_rotary_factor": 1.5},
        "partial_rotary_factor is 1.5: it makes 24 of 16 elements",
    ),
    ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "only causal attention"),
    ({**GEMMA_4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all': only causal attention"),
    ({**GEMMA_4, "num_kv_shared_layers": 1}, "num_kv_shared_layers is 1: of 2 layers, some of each type must"),
    (
        {**GEMMA_4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99},
        "vocab_size_per_layer_input is 99: every token",
    ),
    ({**GEMMA_4, "enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "num_experts is 2; it can't be more"),
    ({**GEMMA_4, "per_layer_config": {"2": {"head_dim": 32}}}, "'2' is none of 2 layers"),
    ({**GEMMA_4, "per_layer_config": {"0": {"sliding_window": 3}}}, "per_layer_config.0.sliding_window is 3: layers"),
    ({**GEMMA_4, "num_hidden_layers": 3, "per_layer_config": {"0": {"head_dim": 8}}}, "layers of one type must have"),
    (
        {**GEMMA_4, "rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters is {'full_attention': {'rope_theta': 5.0}}: sliding_attention layers need",
    ),
    ({"is_causal": False}, "is_causal is False: only causal attention"),
    (
        {"architectures": ["BertForSequenceClassification"]},
        "architecture BertForSequenceClassification is not supported",
    ),
    ({"architectures": ["BertModel"]}, "architecture BertModel is not supported"),
    ({"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True}, "qkv_bias is True: bias is False"),
    ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers is [1]: 1 values"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": "long"}, "sliding_window is 'long'"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked"]}, "chunked is not supported"),
    ({"architectures": ["MptForCausalLM"], "attn_config": {"qk_ln": True}}, "attn_config.qk_ln is True: transformers"),
    (
        {"architectures": ["MptForCausalLM"], "attn_config": {"alibi": False}},
        "attn_config.alibi is False: transformers",
    ),
    (
        {"architectures": ["MptForCausalLM"], "attn_config": {"alibi_bias_max": 16}},
        "attn_config.alibi_bias_max is 16: transformers leaves it out",
    ),
    ({"architectures": ["MptForCausalLM"], "no_bias": False}, "no_bias is False: transformers leaves it out"),
    ({"architectures": ["MptForCausalLM"], "logit_scale": 2.0}, "logit_scale is 2.0: transformers leaves it out"),
    (
        {"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm is True: a residual stream of normalised values",
    ),
    (
        {"architectures": ["BloomForCausalLM"], "slow_but_exact": True, "pretraining_tp": 2},
        "slow_but_exact is True: sums of parts",
    ),
    (
        {"architectures": ["MllamaForCausalLM"], "tie_word_embeddings": True},
        "tie_word_embeddings is True: the embeddings have 8 rows more than the head",
    ),
    (
        {"architectures": ["Apertus1p5TextForCausalLM"], "output_vocab_size": 90, "tie_word_embeddings": True},
        "tie_word_embeddings is True: the head has 90 rows",
    ),
    ({"architectures": ["Apertus1p5TextForCausalLM"], "output_vocab_size": 9999}, "output_vocab_size is 9999: vocab"),
    (
        {"architectures": ["MuseGlimmerForConditionalGeneration"], "tie_word_embeddings": True},
        "tie_word_embeddings is True: the embeddings are normalised",
    ),
    (
        {"architectures": ["LagunaForCausalLM"], "head_dim": 16, "num_attention_heads_per_layer": [4, 3]},
        "num_attention_heads_per_layer is [4, 3]: multiples of num_key_value_heads",
    ),
    (
        {"architectures": ["LagunaForCausalLM"], "moe_router_logit_softcapping": 3.0},
        "moe_router_logit_softcapping is 3",
    ),
    ({"architectures": ["LagunaForCausalLM"], "gating": "per-layer"}, "gating is 'per-layer': not supported"),
    ({"architectures": ["AriaTextForCausalLM"], "mlp_bias": True}, "mlp_bias is True: biases of the shared experts"),
    ({"architectures": ["AXK1ForCausalLM"], "q_lora_rank": None}, "q_lora_rank is None: queries have latents"),
    ({"architectures": ["AXK2ForCausalLM"], "q_lora_rank": None}, "q_lora_rank is None: queries have latents"),
    ({"architectures": ["AXK2ForCausalLM"], "n_group": 2}, "topk_group is missing: n_group and topk_group must be"),
    (
        {"architectures": ["LaraMiniForCausalLM"], "layer_types": ["chunked"] * 2},
        "chunked is not supported; supported:",
    ),
    ({"architectures": ["IQuestCoderForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0: transformers does not"),
    ({"architectures": ["ArceeForCausalLM"], "hidden_act": "silu"}, "hidden_act is 'silu': not supported; supported:"),
    ({"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": True}, "use_bias is True: a shared expert has no"),
    ({"architectures": ["HunYuanDenseV1ForCausalLM"], "use_cla": True}, "use_cla is True: attention across layers"),
    (
        {"architectures": ["HunYuanDenseV1ForCausalLM"], "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_scaling.type is 'yarn': rotated heads would have other norms",
    ),
    (
        {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": [8, 16]},
        "num_experts is [8, 16]: layers with different numbers of experts",
    ),
    ({"architectures": ["HYV3ForCausalLM"], "mlp_bias": True}, "mlp_bias is True: experts have no biases"),
    ({"architectures": ["HYV3ForCausalLM"], "mlp_layer_types": ["dense"]}, "mlp_layer_types is ['dense']: 1 types"),
    ({"architectures": ["HYV3ForCausalLM"], "mlp_layer_types": ["moe"] * 2}, "moe is not supported; supported: dense,"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_fields_are_named_with_their_file(read, tmp_path, changes, message):
    with pytest.raises(UnsupportedModel) as caught:
        read(**changes)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff"])
def test_broken_files_are_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UnsupportedModel, match=r"config\.json: "):
        read_model_config(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"config\.json: not found"):
        read_model_config(tmp_path)


# -- real models

#: Parameters of the published checkpoints.
PARAMETERS = {
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-2-13b-hf": 13_015_864_320,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "SmolLM2-135M-Instruct": 134_515_008,
    "SmolLM2-360M-Instruct": 361_821_120,
    "SmolLM2-1.7B-Instruct": 1_711_376_384,
    "tiny-llama-1.1b-chat": 1_100_048_384,
}


@pytest.fixture(scope="module")
def configs() -> Path:
    default = Path(__file__).resolve().parents[5] / "shared"
    path = Path(os.environ.get("CHORUS_SHARED", default)) / "data" / "configs"
    if not path.is_dir():
        pytest.skip(f"no configurations in {path}; set CHORUS_SHARED")
    return path


@pytest.mark.parametrize("name", PARAMETERS)
def test_real_models_parse_with_the_right_shapes(configs, name):
    raw = json.loads((configs / name / "config.json").read_text())
    config = read_model_config(configs / name)
    assert sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values()) == PARAMETERS[name]
    assert config.projections["o_proj"].dims == (raw["num_attention_heads"] * raw["head_dim"], raw["hidden_size"])
    assert config.projections["k_proj"].outputs == raw["num_key_value_heads"] * raw["head_dim"]
    assert config.dtype == "bfloat16"
    assert rope_of(config).theta == raw["rope_theta"]
    assert rope_of(config).type == ("llama3" if "Llama-3" in name else "default")
    assert flags_of(config) == (name.startswith("Qwen2"), False, False, name.startswith("Qwen3"))
    assert config.max_context == raw["max_position_embeddings"]
    assert config.eos_token_ids


def test_every_real_configuration_is_in_the_table(configs):
    assert {path.parent.name for path in configs.glob("*/config.json")} == set(PARAMETERS)


QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
        "linear_value_head_dim": 8, "full_attention_interval": 3,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
}  # fmt: skip


def test_gated_delta_net_stands_between_layers_of_attention(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    config = read_model_config(tmp_path)
    assert [index for index, layer in enumerate(config.layers) if layer.attention] == [2, 5]
    assert config.recurrent == GatedDeltaSpec(2, 6, 16, 8, eps=1e-6)
    assert (config.recurrent.channels, config.recurrent.in_size) == (112, 112 + 48 + 12)
    assert config.attention.output_gate
    assert config.attention.rope == RopeConfig(8, 1e7, axes=(0, 1, 2, 0))
    shapes = tensor_shapes(config)
    assert shapes["model.layers.0.linear_attn.in_proj_qkv.weight"] == (112, 64)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (112, 1, 4)
    assert shapes["model.layers.2.self_attn.q_proj.weight"] == (2 * 4 * 32, 64)
    assert "model.layers.2.linear_attn.A_log" not in shapes
    assert "model.layers.0.self_attn.q_proj.weight" not in shapes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_num_value_heads": 5},
            "linear_num_value_heads is 5: a multiple of linear_num_key_heads, 2",
        ),
        ({"hidden_act": "gelu_pytorch_tanh"}, "Gated DeltaNet is supported with silu alone"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1: a whole number of at least 2 is needed"),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_attention is not supported; supported: full_attention, "),
    ],
)
def test_what_gated_delta_net_cannot_be_is_refused(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_5, "text_config": {**QWEN3_5["text_config"], **changes}}))
    with pytest.raises(UnsupportedModel, match=message):
        read_model_config(tmp_path)


def test_ranks_share_heads_of_keys_with_their_heads_of_values(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    whole = read_model_config(tmp_path)
    share = Shard(1, 2).config(whole)
    assert share.recurrent == GatedDeltaSpec(1, 3, 16, 8, eps=1e-6)
    assert share.projections["in_proj_qkv"].outputs == 56
    q, k, v = slice(16, 32), slice(48, 64), slice(88, 112)
    at = "model.layers.0.linear_attn."
    for name, parts in {
        "in_proj_qkv.weight": ((q,), (k,), (v,)),
        "conv1d.weight": ((q,), (k,), (v,)),
        "in_proj_z.weight": ((slice(24, 48),),),
        "in_proj_b.weight": ((slice(3, 6),),),
        "in_proj_a.weight": ((slice(3, 6),),),
        "dt_bias": ((slice(3, 6),),),
        "A_log": ((slice(3, 6),),),
        "norm.weight": ((),),
        "out_proj.weight": ((slice(None), slice(24, 48)),),
    }.items():
        assert parts_of(whole)[at + name].share(1, 2) == parts, name


def test_ranks_that_heads_of_keys_do_not_divide_by_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    why = (
        "tensor_parallel_size is 4, and the model's linear_num_key_heads 2 is not divisible by it; "
        "set it to one of 1, 2$"
    )
    with pytest.raises(UnsupportedModel, match=why):
        Shard(0, 4).config(read_model_config(tmp_path))


#: Models with latents.
LATENTS = {
    name: PUBLISHED[title][1]
    for name, title in {"v3": "DeepSeek-V3", "v2-lite": "DeepSeek-V2-Lite", "flash": "GLM-4.7-Flash"}.items()
}


def test_an_indexer_of_blocks_limits_no_tokens(read):
    none = dict.fromkeys(LLAMA, ...)
    tokens = read(**{**none, **LATENTS["v3"], "architectures": ["DeepseekV32ForCausalLM"]})
    assert tokens.top_k == 2048
    own = {"layer_types": ["minimax_m3_sparse"] * 8, "num_key_value_heads": 4, "index_n_heads": 4, "vocab_size": 100}
    blocks = read(**{**none, **SHAPES, **own, "architectures": ["MiniMaxM3VLForCausalLM"]})
    assert all(mixer.block_indexer and mixer.top_k for mixer in blocks.attention_layers)
    assert blocks.top_k is None


@pytest.mark.parametrize(
    ("name", "latent", "scale", "billions"),
    [
        ("v3", LatentSpec(1536, 512, 128, 64, 128, 1e-6), 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, 671.0),
        ("v2-lite", LatentSpec(0, 512, 128, 64, 128, 1e-6), 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, 15.7),
        ("flash", LatentSpec(768, 512, 192, 64, 256, 1e-6), 256**-0.5, 29.9),
    ],
)
def test_latent_attention_as_its_checkpoints_describe_it(read, name, latent, scale, billions):
    config = read(**{**dict.fromkeys(LLAMA, ...), **LATENTS[name]})
    attention = config.attention
    assert (attention.latent, attention.num_kv_heads, attention.head_dim) == (latent, 1, 576)
    assert attention.scale == pytest.approx(scale, rel=1e-12)
    assert (attention.rope.dim, attention.rope.interleaved, attention.rope.attention_factor) == (64, True, 1.0)
    assert sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values()) / 1e9 == pytest.approx(
        billions, abs=0.1
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("v3", {"num_key_value_heads": 8}, "num_key_value_heads is 8: latents serve all heads"),
        ("v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63: rotary embedding needs an even one"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax': softmax is not supported"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("v3", {"n_group": 256}, "n_group is 256: of n_routed_experts, 256, a group must have at least 2"),
        ("v3", {"topk_method": "greedy"}, "topk_method is 'greedy': greedy is not supported"),
        ("v2-lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("v2-lite", {"norm_topk_prob": True}, "norm_topk_prob is True: transformers leaves it out"),
        ("v2-lite", {"attention_bias": True}, "attention_bias is True: biases are not supported where queries have"),
        ("flash", {"mlp_layer_types": ["sparse"] * 46}, "46 types for num_hidden_layers, 47"),
        ("flash", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "all 64 elements of"),
    ],
)  # fmt: skip
def test_what_latent_attention_cannot_be_is_refused(read, name, changes, message):
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        read(**{**dict.fromkeys(LLAMA, ...), **LATENTS[name], **changes})


def test_ranks_share_heads_of_latents(read):
    config = read(**{**dict.fromkeys(LLAMA, ...), **LATENTS["v2-lite"]})
    share = Shard(1, 4).config(config)
    assert (share.attention.num_heads, share.attention.head_dim) == (4, 576)
    at = "model.layers.0.self_attn."
    for name, parts in {
        "kv_a_proj_with_mqa": ((),),
        "kv_b_proj": ((slice(1024, 2048),),),
        "o_proj": ((slice(None), slice(512, 1024)),),
        "k_norm": ((),),
    }.items():
        assert parts_of(config)[f"{at}{name}.weight"].share(1, 4) == parts, name


# -- fields that transformers reads otherwise, or leaves out

GEMMA_3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 20, "num_hidden_layers": 6}
BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Gemma3nForCausalLM", "Olmo3ForCausalLM"])
def test_a_scaling_beside_ropes_by_type_changes_that_of_full_attention(read, architecture):
    scaling = {"rope_type": "linear", "factor": 8.0}
    own = {**GEMMA_3, "architectures": [architecture], "num_kv_shared_layers": 0}
    layers = read(**own, rope_parameters=BY_KIND, rope_scaling=scaling).attention_layers
    ropes = {layer.window is None: layer.rope for layer in layers}
    assert ropes == {True: RopeConfig(16, 1e6, "linear", factor=8.0), False: RopeConfig(16, 1e4)}
    with pytest.raises(UnsupportedModel, match=r"rope_scaling is .*: rope_parameters has no full_attention"):
        read(**own, rope_parameters={"rope_theta": 1e6}, rope_scaling=scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # honoured by another server alone
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is"),
        # of a sister family
        ({**GEMMA_3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: transformers leaves it out"),
        ({"architectures": ["GemmaForCausalLM"], "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"architectures": ["GemmaForCausalLM"], "query_pre_attn_scalar": 100}, "query_pre_attn_scalar is 100"),
        (
            {"architectures": ["Qwen3VLForConditionalGeneration"], "use_sliding_window": True},
            "use_sliding_window is True",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
            },
            "rope_parameters.llama_4_scaling_beta is 0.1: transformers leaves it out",
        ),
        (
            {
                "architectures": ["NanoChatForCausalLM"],
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            "rope_scaling.type is 'yarn': rotated heads would have other norms",
        ),
        (
            {"architectures": ["Cohere2MoeForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0}},
            "transformers leaves it out for this family; set rope_parameters",
        ),
        (
            {"architectures": ["StableLmForCausalLM"], "head_dim": 8},
            "head_dim is 8: hidden_size / num_attention_heads, 16",
        ),
        (
            {"architectures": ["PaddleOCRVLForConditionalGeneration"], "head_dim": 16},
            "mrope_section is missing: its sum must be 8",
        ),
        (
            {"architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]},
            "mrope_section is missing: its sum must be 8",
        ),
        ({"architectures": ["SolarOpenForCausalLM"], "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"architectures": ["MellumForCausalLM"], "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        # null, or nothing, where transformers needs a value
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_k": None}, "moe_k is None: transformers takes no null"),
        ({"architectures": ["HYV3ForCausalLM"], "num_shared_experts": None}, "num_shared_experts is None"),
        ({"architectures": ["FlintForCausalLM"], "sliding_window": None}, "sliding_window is None: a number"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": None}, "topk_method is None"),
        ({"architectures": ["Cohere2MoeForCausalLM"], "rope_parameters": None}, "rope_parameters is None: an object"),
        (
            {"architectures": ["Dots1ForCausalLM"], "sliding_window": None, "max_window_layers": 1},
            "sliding_window is None: layers of sliding_attention need one",
        ),
        ({"rope_theta": None}, "rope_theta is None: transformers takes no null here"),
        (
            {"rope_scaling": {"rope_type": None, "factor": 2.0}},
            "rope_scaling.rope_type is None: transformers takes no null",
        ),
        ({"rms_norm_eps": None}, "rms_norm_eps is None: transformers takes no null"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
            "factor is missing: yarn needs it",
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            "rope_scaling.type is 'mrope': rope type not",
        ),
        ({**GEMMA_3, "sliding_window": None}, "sliding_window is None: layers of sliding_attention need one"),
        *(
            (
                {"architectures": [f"{name}ForCausalLM"], "sliding_window": None, **others},
                f"sliding_window is None: {why}",
            )
            for name, others, why in (
                ("Ministral", {}, "transformers needs one"),
                ("Ministral", {"layer_types": ["full_attention"] * 2}, "transformers needs one"),
                ("Mistral", {"layer_types": None}, "transformers needs one"),
                ("Cwm", {}, "layers of sliding_attention need one"),
                ("GraniteSWA", {}, "layers of sliding_attention need one"),
            )
        ),
        (
            {"architectures": ["GraniteSWAForCausalLM"], "layer_rope_theta": []},
            "layer_rope_theta is []: 0 bases for num_hidden_layers, 2",
        ),
        (
            {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": [2]},
            "moe_topk is [2]: 1 numbers for num_hidden_layers, 2",
        ),
        (
            {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": 2, "num_experts_per_tok": 1},
            "moe_topk is 2: it is another name of num_experts_per_tok",
        ),
        (
            {**GEMMA_4, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "num_kv_shared_layers": 1},
            "num_kv_shared_layers is 1: transformers fails for such layers if hidden_size_per_layer_input is 0",
        ),
        *(
            ({"architectures": ["Llama4ForCausalLM"], "attn_temperature_tuning": value}, f"tuning is {value}: {why}")
            for value, why in ((None, "transformers takes no null"), (0, "true or false"), (0.5, "true or false"))
        ),
        ({"architectures": ["NemotronHForCausalLM"], "attention_bias": None}, "attention_bias is None: transformers"),
        ({"architectures": ["NemotronHForCausalLM"], "attention_bias": True}, "attention_bias is True: transformers"),
        ({"layer_types": []}, "layer_types is []: a type for each layer is needed"),
        # absurd
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 1e30}},
            "rope_scaling.factor is 1e+30: a number of at most",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 1e8}},
            "rope_scaling.factor is 100000000.0: a number from 1e-06",
        ),
        (
            {
                "rope_theta": 1.0,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            "rope_theta is 1.0: yarn divides by its logarithm",
        ),
        *(
            (
                {"architectures": [f"{name}ForCausalLM"], "hidden_size": 3, **others},
                "hidden_size is 3: num_attention_heads",
            )
            for name, others in (("Llama", {}), ("Mixtral", {"num_local_experts": 4}), ("OlmoHybrid", {}))
        ),
        *(
            (
                {"architectures": [f"{name}ForCausalLM"], "query_pre_attn_scalar": 256.5},
                "query_pre_attn_scalar is 256.5",
            )
            for name in ("Gemma2", "Gemma3", "VaultGemma")
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "original_max_position_embeddings": 1,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
            },
            "original_max_position_embeddings is 1: longrope divides by its logarithm",
        ),
        (
            {
                "architectures": ["HunYuanDenseV1ForCausalLM"],
                "head_dim": 2,
                "rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9.0},
            },
            "head_dim is 2: alpha needs more than two elements that rotate",
        ),
        *(
            (
                {"architectures": [name], "num_key_value_heads": 4, "qk_rope_head_dim": 8, "head_dim": 2},
                "head_dim is 2: transformers rotates so many elements",
            )
            for name in ("DeepseekV3ForCausalLM", "YoutuForCausalLM")
        ),
        ({"rope_theta": 1e30}, "rope_theta is 1e+30: a number of at most 1e+12"),
        ({"rms_norm_eps": 10**400}, "a number of at most 1e+12 is needed"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: a whole number of at most 10000"),
        ({"max_position_embeddings": 2**31}, "a whole number of at most 33554432"),
        ({"hidden_size": 10**30}, "a whole number of at most 2147483647"),
    ],
)
def test_what_transformers_leaves_out_or_refuses_is_named(read, changes, message):
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        read(**changes)


def test_gelu_of_gemma_is_its_approximation_as_first_published(read):
    assert read(architectures=["GemmaForCausalLM"], hidden_act="gelu") == read(architectures=["GemmaForCausalLM"])


def test_neutral_values_of_fields_that_others_have_are_no_error(read):
    neutral = {"partial_rotary_factor": 1.0, "attn_logit_softcapping": None, "use_sliding_window": False}
    assert read(**neutral, rope_scaling=None, sliding_window=None) == read()
    assert read(rope_scaling={"rope_type": "default", "partial_rotary_factor": 1.0}) == read()


@pytest.mark.parametrize(
    "field", [{"partial_rotary_factor": 0.5}, {"rope_theta": 5.0}, {"sliding_window": 8}, {"rms_norm_eps": 0.5}]
)
def test_fields_outside_the_text_part_are_not_the_text_part_s(read, field):
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**LLAMA, "model_type": "mistral"}}
    assert read(**whole, **field) == read(**whole)
