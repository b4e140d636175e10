"""DiffLlama, whose attention gives differences between heads: configuration, factors and refusals. For paths, see
`paths`.
"""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.families.diffllama.ops import DifferenceSpec
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard

from ..test_families import executor_of
from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("diffllama", tmp_path)
    return tmp_path


def test_factors_before_training_are_transformers_own(tiny):
    it = tiny("diffllama-biased")
    layers = it.reference.get_base_model().model.layers
    for spec, layer in zip(read_model_config(it.model).layers, layers, strict=True):
        assert spec.difference.first == layer.self_attn.lambda_init


def test_a_factor_is_of_four_vectors():
    q1, k1, q2, k2 = vectors = torch.tensor([[0.5, 1.0], [2.0, -1.0], [1.0, 0.0], [0.25, 9.0]])
    want = 1.0 - torch.exp(torch.tensor(0.25)) + 0.3
    assert float((q1 * k1).sum()) == 0
    assert float((q2 * k2).sum()) == 0.25
    assert torch.allclose(DifferenceSpec(0.3, 2).factor(vectors.flatten()), want)


def test_heads_of_keys_take_pairs_of_values_in_turn():
    assert DifferenceSpec(0.2, 8).pairs(2) == (0, 1, 0, 1)
    assert DifferenceSpec(0.2, 8).pairs(4) == (0, 2, 1, 3, 0, 2, 1, 3)


def test_pages_have_heads_twice_as_wide(model):
    layout = executor_of(model).layout
    assert {(shape.heads, shape.head_dim) for shape in layout.layer_shapes} == {(2, 32)}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads.*an even number is needed"),
        ({"attention_dropout": 0.1}, "attention_dropout.*only 0 is supported"),
    ],
)
def test_what_is_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


def test_ranks_are_refused(model):
    with pytest.raises(UnsupportedModel, match="heads are subtracted from others"):
        Shard(0, 2).config(read_model_config(model))
