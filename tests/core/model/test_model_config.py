"""`config.json` in old and new spellings, of 20 real models, and wrong in every way we could think of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from chorus.core.model.config import SUPPORTED_ARCHITECTURES, ModelConfig, UnsupportedModel
from chorus.core.model.rope_config import RopeConfig
from chorus.core.model.weights import tensor_shapes

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def read(tmp_path):
    """`read(field=value, …)`: the configuration of LLAMA with changes; `...` as a value removes the field."""

    def make(**changes):
        raw = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return ModelConfig.read(tmp_path)

    return make


# -- spellings


@pytest.mark.parametrize("type_field", ["rope_type", "type"])
def test_old_and_new_spelling_of_rope_are_the_same(read, type_field):
    scaling = {type_field: "llama3", **LLAMA3_SCALING}
    new = read(rope_parameters={**scaling, "rope_theta": 500000})
    old = read(rope_theta=500000.0, rope_scaling=scaling)
    assert new == old
    assert new.rope == RopeConfig(new.head_dim, 500000.0, "llama3", factor=8.0, original_max_position_embeddings=64)
    plain = read(rope_theta=1e6, rope_scaling=None)
    assert (
        plain.rope
        == read(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).rope
        == RopeConfig(plain.head_dim, 1e6)
    )
    assert read().rope == RopeConfig(plain.head_dim, 10000.0)


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
    ],
)
def test_frequencies_equal_transformers_bit_for_bit(read, rope, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=head_dim, rope_parameters=dict(rope), max_position_embeddings=512)
    want = LlamaRotaryEmbedding(config)
    assert torch.equal(read(rope_parameters=rope, head_dim=head_dim).inverse_frequencies(), want.inv_freq)
    assert want.attention_scaling == 1.0


def test_defaults_are_those_of_transformers(read):
    import transformers

    for architecture in SUPPORTED_ARCHITECTURES:
        config = read(architectures=[architecture], num_key_value_heads=..., max_position_embeddings=...,
                      hidden_size=128, num_attention_heads=64)  # fmt: skip
        own = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(
            hidden_size=128, num_attention_heads=64, num_hidden_layers=2, pad_token_id=None
        )
        assert config.num_kv_heads == (64 if architecture.startswith("Llama") else own.num_key_value_heads)
        assert config.head_dim == (getattr(own, "head_dim", None) or 2)
        assert config.max_position_embeddings == own.max_position_embeddings
        assert config.sliding_window == getattr(own, "sliding_window", None)
        assert config.rms_norm_eps == own.rms_norm_eps
        assert config.rope.theta == own.rope_parameters["rope_theta"]


def test_head_counts_and_dims(read):
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(head_dim=24).q_size == 96
    assert read(head_dim=None).head_dim == 16
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_biases_and_norms_by_architecture(read):
    def flags(**changes):
        config = read(attention_bias=True, mlp_bias=True, sliding_window=None, **changes)
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert flags() == (True, True, True, False)
    assert flags(architectures=["MistralForCausalLM"]) == (False, False, False, False)
    assert flags(architectures=["Qwen2ForCausalLM"]) == (True, False, False, False)
    assert flags(architectures=["Qwen3ForCausalLM"]) == (True, True, False, True)
    assert flags(architectures=["SeedOssForCausalLM"]) == (True, False, True, False)
    silent = read(architectures=["SeedOssForCausalLM"], attention_out_bias=True)
    assert (silent.qkv_bias, silent.o_bias, silent.mlp_bias) == (True, True, False)
    assert not any((read().qkv_bias, read().o_bias, read().mlp_bias))


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, 100),
        ({"architectures": ["MistralForCausalLM"]}, 4096),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 100}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True,
          "max_window_layers": 1}, 100),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 100, "use_sliding_window": True,
          "layer_types": ["full_attention", "sliding_attention"]}, 100),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 100, "use_sliding_window": True,
          "layer_types": ["full_attention"] * 2, "max_window_layers": 0}, None),
    ],
)  # fmt: skip
def test_sliding_window_caps_the_context(read, changes, window):
    config = read(**changes)
    assert config.sliding_window == window
    assert config.max_context == min(512, window or 512)


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


# -- refusals

WRONG = [
    *(({name: ...}, f"{name} is missing") for name in
      ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
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
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM': a list"),
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, Mistral"),
    ({"architectures": ["GptOssForCausalLM"], "num_local_experts": 32}, "GptOssForCausalLM is not supported;"),
    ({"architectures": []}, "architecture none named is not supported"),
    ({"architectures": ...}, "architecture none named is not supported"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear': an object"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic': rope type not supported"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters.rope_type is 'yarn'"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "factor": None}}, "rope_scaling.factor is None"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 1.0}}, "it must be above"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention is"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.2}}, "attention_factor is 1.2"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": "long"}, "sliding_window is 'long'"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked"]}, "chunked is not supported"),
]  # fmt: skip


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
        ModelConfig.read(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"config\.json: not found"):
        ModelConfig.read(tmp_path)


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
    default = Path(__file__).resolve().parents[4] / "shared"
    path = Path(os.environ.get("CHORUS_SHARED", default)) / "data" / "configs"
    if not path.is_dir():
        pytest.skip(f"no configurations in {path}; set CHORUS_SHARED")
    return path


@pytest.mark.parametrize("name", PARAMETERS)
def test_real_models_parse_with_the_right_shapes(configs, name):
    raw = json.loads((configs / name / "config.json").read_text())
    config = ModelConfig.read(configs / name)
    assert sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values()) == PARAMETERS[name]
    assert config.module_dims["o_proj"] == (raw["num_attention_heads"] * raw["head_dim"], raw["hidden_size"])
    assert config.module_dims["k_proj"][1] == raw["num_key_value_heads"] * raw["head_dim"]
    assert config.dtype == "bfloat16"
    assert config.rope.theta == raw["rope_theta"]
    assert config.rope.type == ("llama3" if "Llama-3" in name else "default")
    assert config.qk_norm == name.startswith("Qwen3")
    assert config.qkv_bias == name.startswith("Qwen2")
    assert config.max_context == (4096 if name.startswith("Mistral") else raw["max_position_embeddings"])
    assert config.eos_token_ids


def test_every_real_configuration_is_in_the_table(configs):
    assert {path.parent.name for path in configs.glob("*/config.json")} == set(PARAMETERS)
