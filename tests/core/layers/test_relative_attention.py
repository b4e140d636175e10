"""Inkling's attention: learned numbers of distances, growth of queries, layers with windows of other heads."""

from __future__ import annotations

import json

import pytest
import torch

from chorus.core.model.program.layer_program import layer_program
from chorus.core.model.program.ops import Attend, Heads
from chorus.core.model.program.relative_ops import TakeRelative
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.attention import LogGrowth, RelativeSpec
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.slots import slots

from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.numerics, pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("inkling", tmp_path)
    return tmp_path


def test_growth_is_transformers_own():
    found = LogGrowth(0.4, 12).factors(40)
    places = torch.arange(40)
    assert torch.equal(found, 1.0 + 0.4 * torch.log(((places + 1).float() / 12).clamp(min=1.0)))
    assert (found[:12] == 1).all()
    assert found[12] > 1


def test_layers_as_transformers_has_them(model):
    config = read_model_config(model)
    sliding, whole = (config.layers[at].attention for at in (0, 1))
    assert (sliding.num_heads, sliding.num_kv_heads, sliding.head_dim, sliding.window) == (6, 2, 24, 20)
    assert (whole.num_heads, whole.num_kv_heads, whole.head_dim, whole.window) == (4, 2, 16, None)
    assert (sliding.relative, whole.relative) == (RelativeSpec(6, 20), RelativeSpec(6, 24))
    assert (sliding.query_growth, whole.query_growth) == (None, LogGrowth(0.4, 12))
    assert (sliding.form, whole.form) == ("sliding", "")
    assert whole.scale == 1 / 16
    assert whole.rope is None
    assert (config.logits_scale, config.embedding_rows_eps) == (0.5, 1e-6)
    assert {"profiles"} <= {slot.name for slot in slots(config.layers[0], config)}


def test_windows_with_the_same_heads_are_one_form(tmp_path):
    save_family("inkling-padded", tmp_path)
    config = read_model_config(tmp_path)
    assert [layer.attention.form for layer in config.layers] == ["", ""]
    assert [layer.attention.window for layer in config.layers] == [None, 16]
    assert (config.vocab_size, config.further_embeddings, config.further_logits) == (150, 10, 10)


def test_the_program_and_its_text(model):
    config = read_model_config(model)
    program = layer_program(config.layers[1], config.norm)
    kinds = [type(op) for op in program.ops]
    assert kinds.index(Heads) - 1 == kinds.index(TakeRelative)
    (attend,) = (op for op in program.ops if isinstance(op, Attend))
    assert attend.reads == ("q", "rel")
    (part,) = (each for each in program.segments if attend in each.mixers)
    assert {each.name for each in part.reads} == {"q", "rel"}, "both outlive a captured piece"
    assert "sees all tokens; scale 0.0625, learned numbers of 24 distances" in "\n".join(program_lines(config))


def test_ranks_share_heads(model):
    config = read_model_config(model)
    share = Shard(0, 2).config(config).layers[0]
    assert (share.attention.num_heads, share.convs.heads) == (3, ((1, 16), (1, 24)))
    with pytest.raises(UnsupportedModel, match=r"num_key_value_heads 3 neither divides it"):
        Shard(0, 2).config(read_model_config(changed(model, swa_num_key_value_heads=3)))


def test_fields_of_published_checkpoints(model):
    raw = json.loads((model / "config.json").read_text())
    own = read_model_config(model)
    names = {"conv_kernel_size": "sconv_kernel_size", "max_position_embeddings": "model_max_length"}
    for name, other in names.items():
        raw[other] = raw.pop(name)
    raw["dense_intermediate_size"], raw["intermediate_size"] = (
        raw["intermediate_size"],
        raw.pop("moe_intermediate_size"),
    )
    raw["dense_mlp_idx"], raw["local_layer_ids"] = 1, [0, 2]
    del raw["mlp_layer_types"], raw["layer_types"]
    (model / "config.json").write_text(json.dumps(raw))
    assert read_model_config(model) == own


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"layer_types": ["hybrid", "full_attention"] * 2}, "layer_types.*full_attention is not supported"),
        ({"layer_types": ["hybrid"]}, "layer_types.*1 types for num_hidden_layers, 4"),
        ({"conv_kernel_size": 1}, "conv_kernel_size"),
        ({"swa_num_key_value_heads": 4}, "num_key_value_heads.*multiple"),
    ],
    ids=str,
)
def test_what_is_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))
