"""Every architecture of transformers' causal and image-text auto classes is read, or refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from chorus.core.model.families.registry import FAMILIES
from chorus.core.model.families.unserved import UNSERVED
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel

MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


def _names() -> list[tuple[str, str]]:
    """Types of models, each with the name of its class."""
    pairs = ((kind, named) for mapping in MAPPINGS for kind, named in mapping.items())
    return sorted({(kind, each) for kind, named in pairs for each in ([named] if isinstance(named, str) else named)})


NAMES = _names()
SERVED = [pair for pair in NAMES if pair[1] in FAMILIES]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


#: Fields without which the default configuration of a type is no model, in transformers neither; of Step 3.7 layers
#: that differ.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": None, "sliding_attention": ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4v_text": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}},
    "hunyuan_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [16, 16, 16, 16]}},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 64,
    },
    "step3p5": {
        "num_hidden_layers": 12,
        "num_sliding_attention_heads": 96,
        "sliding_window": 512,
        "layer_types": ["full_attention", "sliding_attention"] * 6,
    },
}


def written(path: Path, kind: str, architecture: str) -> PreTrainedConfig:
    """transformers' configuration with its default values, saved as it saves a model's."""
    config = CONFIG_MAPPING[kind]()
    if (needed := NEEDED.get(config.get_text_config().model_type)) is not None:
        config = CONFIG_MAPPING[kind](**(needed if config.get_text_config() is config else {"text_config": needed}))
    config.architectures = [architecture]
    (path / "config.json").write_text(config.to_json_string())
    return config


def test_each_name_is_served_or_has_a_reason():
    """An entry of a family that is served since is taken out."""
    names = {name for _, name in NAMES}
    assert names - FAMILIES.keys() == names & UNSERVED.keys()
    assert not UNSERVED.keys() & FAMILIES.keys()
    assert UNSERVED.keys() <= names


@pytest.mark.parametrize("architecture", UNSERVED)
def test_a_name_that_is_not_served_is_refused_by_its_reason(tmp_path, architecture):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(UnsupportedModel) as error:
        read_model_config(tmp_path)
    assert str(error.value).endswith(f"architecture {architecture} is not supported: {UNSERVED[architecture]}")


@pytest.mark.parametrize(("kind", "architecture"), SERVED)
def test_a_name_that_is_served_has_the_shape_of_transformers(tmp_path, kind, architecture):
    config = written(tmp_path, kind, architecture)
    text, found = config.get_text_config(), read_model_config(tmp_path)
    ours = found.num_layers, found.hidden_size, found.vocab_size
    assert ours == (text.num_hidden_layers, text.hidden_size, text.vocab_size)


@pytest.mark.parametrize("kind", ["step3p7", "dots3_note", "gemma4"])
def test_sizes_of_each_layer_are_those_of_transformers(tmp_path, kind):
    """transformers fills numbers of layers with zeros: `per_layer_config` of a model of 12 has those of 00 to 11."""
    (architecture,) = {name for other, name in SERVED if other == kind and name.endswith("Generation")}
    config = written(tmp_path, kind, architecture).get_text_config()
    raw = json.loads(config.to_json_string())
    assert any(name.startswith("0") for name in raw["per_layer_config"])
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": raw}))
    layers, each = read_model_config(tmp_path).layers, config.per_layer_config
    for layer, own in zip(layers, each, strict=True):
        mixer = layer.attention
        assert mixer is not None
        assert mixer.num_heads == own.num_attention_heads
        if mixer.latent is not None:
            assert (mixer.latent.kv_rank, mixer.latent.key_dim) == (own.kv_lora_rank, own.qk_nope_head_dim)
        else:
            assert (mixer.head_dim, mixer.num_kv_heads) == (own.head_dim, own.num_key_value_heads)
