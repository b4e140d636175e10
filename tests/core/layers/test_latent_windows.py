"""Dots 3 Note, with windows over latents of other sizes: configuration, pages, norms and refusals. For paths, see
`paths`.
"""

from __future__ import annotations

import json

import pytest
import torch

from chorus.core.model.program.ops.gates import TakeGates
from chorus.core.model.program.ops.latents import Latents
from chorus.core.model.program.ops.norm import Norm
from chorus.core.model.program.text import program_lines
from chorus.core.model.program.torch_step import OpContext, Step, batch_of_parts
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard

from ..test_families import executor_of
from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("dots-3-note", tmp_path)
    return tmp_path


def forms(config):
    return ["windows" if it.window else "indexer" if it.indexer else "whole" for it in config.attention_layers]


def test_layers_with_windows_have_latents_of_their_own_sizes(model):
    whole, _, windowed, _ = read_model_config(model).attention_layers
    own = [(it.num_heads, it.latent.q_rank, it.latent.kv_rank, it.latent.value_dim) for it in (whole, windowed)]
    assert own == [(4, 24, 32, 24), (2, 16, 40, 16)]
    assert (whole.window, windowed.window, windowed.top_k) == (None, 20, None)
    assert windowed.scale == 24**-0.5
    assert (whole.rope.theta, windowed.rope.theta) == (8e7, 5e4)
    layout = executor_of(model).layout
    assert [shape.head_dim for shape in layout.layer_shapes] == [32 + 8 + 16, 32 + 8 + 16, 48, 48]


def test_published_names_mean_the_same(model):
    """Sizes of layers with windows as `swa_…`, and layers with an indexer that are called full."""
    want = read_model_config(model)
    raw = json.loads((model / "config.json").read_text())
    raw["layer_types"] = ["full_attention" if each == "indexed_attention" else each for each in raw["layer_types"]]
    del raw["per_layer_config"], raw["mlp_layer_types"], raw["rope_parameters"], raw["sliding_window"]
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 40, "head_dim": 24}
    sizes |= {"qk_nope_head_dim": 16, "v_head_dim": 16}
    raw |= {f"swa_{name}": size for name, size in sizes.items()}
    shared = raw.pop("shared_experts_intermediate_size")
    raw |= {"moe_shared_expert_intermediate_size": shared, "sliding_window_size": 20, "rope_theta": 8e7}
    raw |= {"moe_layer_freq": [0, 1, 1, 1]}
    (model / "config.json").write_text(json.dumps(raw))
    assert read_model_config(model).layers == want.layers


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, ["indexer", "indexer", "windows", "windows"]),
        ({"use_dsa": False, "rope_parameters": None}, ["whole", "whole", "windows", "windows"]),
        ({"layer_types": None}, ["indexer", "indexer", "windows", "windows"]),
        ({"layer_types": ["full_attention", "indexed_attention"] + ["sliding_attention"] * 2, "rope_parameters": None},
         ["whole", "indexer", "windows", "windows"]),
    ],
)  # fmt: skip
def test_types_of_layers(model, fields, kinds):
    assert forms(read_model_config(changed(model, **fields))) == kinds


def test_factors_of_latents_are_in_norms_and_the_key_has_its_own(model):
    config = read_model_config(model)
    own = {slot.name: slot for slot in config.composed(config.layers[2]).slots}
    assert own["q_norm"].factor == (64 / 16) ** 0.5
    assert own["k_norm"].factor == (64 / 40) ** 0.5
    assert (own["k_rotated_norm"].factor, own["k_rotated_norm"].tensors[0].shape) == (None, (8,))
    ops = config.composed(config.layers[2]).program.ops
    assert next(op for op in ops if isinstance(op, Latents)).kept == "kv"
    assert [op.weight for op in ops if isinstance(op, Norm)] == [
        "attention_norm",
        "q_norm",
        "k_rotated_norm",
        "mlp_norm",
    ]
    assert "16 for each of 2 heads" in "\n".join(program_lines(config))


def test_a_heads_gate_is_that_of_all_its_elements():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    step = Step(batch_of_parts(), [], {"in": x})
    TakeGates("in", "gates", heads=2, width=3).torch(OpContext(0, {}, None))(step)
    assert step.names["gates"].tolist() == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]


def test_ranks_share_heads_of_both_kinds(model):
    share = Shard(1, 2).config(read_model_config(model))
    assert [it.num_heads for it in share.attention_layers] == [2, 2, 1, 1]
    own = {each.path: each for each in share.composed(share.layers[2]).projections}
    assert own["self_attn.g_proj"].outputs == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"layer_types": ["chunked"] * 4}, "chunked is not supported; supported: full_attention, indexed_attention"),
        ({"layer_types": ["full_attention"] * 2}, "2 types for num_hidden_layers, 4"),
        ({"per_layer_config": {"2": {"kv_lora_rank": 8}}}, "layers of one type must have the same sizes"),
        ({"per_layer_config": {"2": {"rms_norm_eps": 1.0}}}, "2.rms_norm_eps is 1.0: layers may differ in"),
        ({"per_layer_config": {"2": {"head_dim": 9}, "3": {"head_dim": 9}}}, "it must be 24, as latents have it"),
        ({"rope_parameters": {"indexed_attention": {"rope_type": "default", "rope_theta": 9.0}}},
         "layers of sliding_attention need an object of that name"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 9.0}}, "it is an older name of rope_parameters"),
        ({"mlp_layer_types": None, "moe_layer_freq": [1, 0]}, "2 numbers for num_hidden_layers, 4"),
        ({"n_group": 16}, "a group must have at least"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_field(model, fields, why):
    with pytest.raises(UnsupportedModel) as error:
        read_model_config(changed(model, **fields))
    assert why in str(error.value)
