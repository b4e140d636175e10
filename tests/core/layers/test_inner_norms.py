"""BitNet, with norms inside of attention and of the feed-forward part: names and refusals. For paths, see `paths`."""

from __future__ import annotations

import pytest

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import Activation
from chorus.core.model.weights.shard import Shard

from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("bitnet", tmp_path)
    return tmp_path


def test_norms_are_as_wide_as_what_they_read(model):
    config = read_model_config(changed(model, hidden_act=None))
    own = {slot.name: slot.tensors[0] for slot in config.composed(config.layers[0]).slots}
    assert (own["attention_inner_norm"].path, own["attention_inner_norm"].shape) == (
        "self_attn.attn_sub_norm.weight",
        (64,),
    )
    assert (own["mlp_inner_norm"].path, own["mlp_inner_norm"].shape) == ("mlp.ffn_sub_norm.weight", (96,))
    assert config.layers[0].dense.activation is Activation.RELU_SQUARED, "where the field is missing"


def test_heads_that_are_not_as_wide_as_the_norm_are_refused(model):
    with pytest.raises(UnsupportedModel, match=r"head_dim.*as wide as hidden_size; heads have 32 elements"):
        read_model_config(changed(model, head_dim=8))


def test_packed_ternary_weights_are_refused_by_a_reason(model):
    with pytest.raises(UnsupportedModel, match=r"quant_method.*bitnet.*rounds what goes into products"):
        read_model_config(changed(model, quantization_config={"quant_method": "bitnet"}))


def test_ranks_are_refused(model):
    with pytest.raises(UnsupportedModel, match=r"norms inside of attention and of feed-forward parts.*set it to one"):
        Shard(0, 2).config(read_model_config(model))
