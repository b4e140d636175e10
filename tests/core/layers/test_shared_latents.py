"""Mistral Large 4: latents of an earlier layer, learned factors, tokens and refusals. See `test_text_parts`, too."""

from __future__ import annotations

import json

import pytest
import torch

from chorus.core.model.families.mistral_large_4.ops import LogScaleHeads
from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.program.ops.indexers import Index
from chorus.core.model.program.ops.latents import Latents
from chorus.core.model.program.text import program_lines
from chorus.core.model.program.torch_step import OpContext, Step, batch_of_parts
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.layers import kv_index, page_index
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.shard import Shard

from ..test_families import executor_of
from ..test_text_parts import ALL, OF_TEXT, RENAMED, check_text, save_whole

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

NAME = "MistralLarge4ForConditionalGeneration"
CONFIG, TEXT, TOWER = RENAMED[NAME]
TARGETS = OF_TEXT.replace("v_proj", "kv_b_proj|kv_a_proj_with_mqa|indexer.wq_b|indexer.wk")

#: Layers with latents of an earlier one, with an indexer of their own and without.
SHARED = {
    "num_hidden_layers": 6,
    "no_rope_layers": [1, 0, 1, 1, 0, 1],
    "kv_source_layers": [0, 1, 0, 3, 1, 3],
    "indexer_types": ["full", "full", "full", "shared", "shared", "full"],
}


@pytest.fixture
def model(tmp_path):
    save_whole(NAME, CONFIG, {**TEXT, **SHARED}, TOWER, tmp_path)
    return tmp_path


def changed(path, **fields):
    """A configuration whose text part has other values of fields."""
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"] |= fields
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize("targets", [TARGETS, ALL])
@pytest.mark.parametrize(
    "changes",
    [
        SHARED,
        {"no_rope_layers": None, "no_rope_layer_interval": 2, "n_group": 4, "topk_group": 2, "index_topk": 5},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1, "qk_rope_head_dim": 4, "final_logit_softcapping": 3.0},
    ],
)
def test_tokens_are_those_of_transformers_and_peft(tmp_path, changes, targets, drive):
    text = {name: value for name, value in {**TEXT, **changes}.items() if value is not None}
    check_text(tmp_path, NAME, CONFIG, text, TOWER, targets, drive)


def test_pages_keep_latents_of_layers_that_have_their_own(model):
    config = read_model_config(model)
    latents, key = 32 + 8, 16
    kept = [latents + key, 32 + key, key, latents, key]
    assert [shape.head_dim for shape in executor_of(model).layout.layer_shapes] == kept
    assert kv_index(config.layers) == [0, 1, 0, 3, 1, 3]
    assert page_index(config.layers) == [0, 1, 2, 3, 3, 4]


def test_a_layer_that_shares_makes_no_latents(model):
    config = read_model_config(model)
    paths = [{each.path.rpartition(".")[2] for each in config.composed(layer).projections} for layer in config.layers]
    assert ["kv_a_proj_with_mqa" in own for own in paths] == [True, True, False, True, False, False]
    names = [{slot.name for slot in config.composed(layer).slots} for layer in config.layers]
    assert ["k_norm" in own for own in names] == [True, True, False, True, False, False]
    ops = [config.composed(layer).program.ops for layer in config.layers]
    assert [next(op for op in own if isinstance(op, Latents)).kept is None for own in ops] == [
        False, False, True, False, True, True,
    ]  # fmt: skip
    assert [next((op.x for op in own if isinstance(op, Index)), None) for own in ops] == ["ih"] * 3 + [None] * 2 + [
        "ih"
    ]
    assert "an earlier layer's latents" in "\n".join(program_lines(config))


def test_frequencies_have_learned_factors(model):
    config = read_model_config(model)
    with open_weights(model, config, torch.float32) as found:
        factors = found.rope_factors()
    assert factors is not None
    assert (factors.shape, bool((factors > 1).all())) == ((4,), True)
    assert config.learned_rope == config.attention.rope


def test_queries_grow_with_their_position():
    weight, step = torch.tensor([0.5, 0.0, 1.0, 2.0]), Step(batch_of_parts(), [], {"q": torch.ones(2, 6)})
    step.batch.positions = torch.tensor([0, 1])
    step.layers = [{"log_scaling": weight}]
    LogScaleHeads("q", "q", 2, "log_scaling").torch(OpContext(0, {}, None))(step)
    factor = 1 + 0.5 * torch.log(torch.tensor(2.0))
    assert torch.allclose(step.names["q"], torch.tensor([[1.0] * 3 + [2.0] * 3, [float(factor)] * 3 + [2.0] * 3]))


def test_ranks_share_heads_and_have_the_indexer(model):
    config = Shard(1, 2).config(read_model_config(model))
    own = {each.path.rpartition(".")[2]: each for each in config.composed(config.layers[0]).projections}
    assert [own[name].is_replicated for name in ("wq_b", "wk", "weights_proj", "q_proj")] == [True, True, True, False]
    assert config.attention.num_heads == 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_source_layers": [0, 1, 0]}, "3 values for num_hidden_layers, 6"),
        ({"kv_source_layers": [0, 2, 2, 3, 4, 5]}, "each must be the layer itself, or an earlier one that is its own"),
        (
            {"kv_source_layers": [0, 1, 2, 0, 4, 5]},
            "the latents of layer 0 for layer 3: a layer can only",
        ),
        (
            {"kv_source_layers": [0, 0, 2, 3, 4, 5]},
            "the latents of layer 0 for layer 1: a layer can only",
        ),
        ({"no_rope_layers": [1]}, "1 values for num_hidden_layers, 6"),
        ({"layer_types": ["full_attention"] * 6}, "full_attention is not supported; supported: indexed_attention"),
        ({"indexer_types": ["shared"] * 6}, "no layer before the first one has chosen tokens"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_field(model, fields, why):
    with pytest.raises(UnsupportedModel) as error:
        read_model_config(changed(model, **fields))
    assert why in str(error.value)


def test_the_native_decoder_refuses_it_by_name(model):
    assert why_unsupported(read_model_config(model), torch.float32) is not None
