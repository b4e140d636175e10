"""`config.json` as it is published: each has the weights that its model is known for, and no leftover is refused."""

from __future__ import annotations

import json

import pytest
import torch

from chorus.core.model.families.seeing import TEXTS
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.attention import TemperatureTuning
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.tensor_parts import tensor_shapes

from ...published_configs import PUBLISHED
from ...test_text_parts import MODELS

pytestmark = pytest.mark.wide

#: Models whose class has a default shape that transformers itself can't compute.
WITHOUT_SHAPE = {
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
}

#: Types of text parts, and what sees beside them.
TYPES = [
    ("LlavaForConditionalGeneration", each) for each in TEXTS if each != "kimi_k2" and not each.startswith("glm4v")
]
TYPES += [("Mistral3ForConditionalGeneration", each) for each in ("mistral", "ministral3", "mistral4")]


@pytest.fixture
def read(tmp_path):
    def make(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_model_config(tmp_path)

    return make


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_have_the_weights_that_they_are_known_for(read, name):
    billions, raw = PUBLISHED[name]
    weights = sum(torch.Size(shape).numel() for shape in tensor_shapes(read(raw)).values())
    assert weights / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("architecture", "text"), [*((each, None) for each in MODELS if each not in WITHOUT_SHAPE), *TYPES]
)
def test_a_text_part_may_leave_out_all_that_equals_its_defaults(read, architecture, text):
    """transformers saves parts so: Gemma 3 4B's has no numbers of heads, LLaVA 1.5's no shape at all."""
    import transformers

    whole = None if text else getattr(transformers, architecture).config_class()
    config = (type(whole.get_text_config()) if whole else transformers.CONFIG_MAPPING[text])()
    full = json.loads(json.dumps(config.to_dict(), default=str))
    left_out = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
    if full.get("head_dim") is None:
        left_out.add("head_dim")
    full = {name: value for name, value in full.items() if name not in left_out}
    few = {"model_type": config.model_type}
    want = read({"architectures": [architecture], "text_config": full})
    assert read({"architectures": [architecture], "text_config": few}) == want


def test_queries_of_ministral_3_grow_with_positions(read):
    assert read(PUBLISHED["Ministral 3 3B"][1]).attention.log_scaling == TemperatureTuning(0.1, 16384)


def test_heads_of_mistral_beside_vision_share_the_hidden_size(read):
    text = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = read({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert config.attention.head_dim == 16


def test_layers_of_gemma_4_may_be_numbered_with_zeros_before(read):
    """transformers writes as many digits as the last layer has."""
    text = {"num_hidden_layers": 12, "global_head_dim": 512}
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    want = read(whole)
    for last in ("11", "011"):
        text["per_layer_config"] = {"05": {"head_dim": 512}, last: {"head_dim": 512}}
        assert read(whole) == want
    text["per_layer_config"] = {"05": {"head_dim": 512}, "12": {"head_dim": 512}}
    with pytest.raises(UnsupportedModel, match="'12' is none of 12 layers"):
        read(whole)


def test_a_model_of_text_alone_states_its_shape(read):
    with pytest.raises(UnsupportedModel, match="is missing: a whole number"):
        read({"architectures": ["MistralForCausalLM"], "model_type": "mistral"})
