"""Kimi Linear, whose layers are of Kimi Delta Attention or of latent attention: names and configurations."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.recurrent import GatedDeltaSpec
from chorus.core.model.weights.shard import Shard
from chorus.memory.files.format import inspect_adapter

from ..paths.asked import answers, told
from ..tiny_families import make_all_linear

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

PLAIN, Q_LATENTS = "kimi-linear", "kimi-linear-q-latents"


def test_what_all_linear_reaches():
    """Each low-rank projection of gates, and those of both kinds of attention."""
    it = make_all_linear(PLAIN)
    gates, delta = ["f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"], [f"{each}_proj@linear" for each in "qkvo"]
    latents, shared = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], ("gate_proj", "up_proj", "down_proj")
    found = set(inspect_adapter(it.adapters["all"], read_model_config(it.model).module_paths).targets)
    assert found == {*gates, *delta, "b_proj", *latents, *shared, *(f"shared_expert.{each}" for each in shared)}


def test_names_of_modules_of_the_published_code(drive, tmp_path):
    it = make_all_linear(PLAIN)
    shutil.copytree(it.adapters["all"], tmp_path / "all")
    file = tmp_path / "all" / "adapter_model.safetensors"
    tensors = load_file(file)
    names = {".forget_gate.": ".", ".mlp.shared_experts.": ".block_sparse_moe.shared_experts."}
    for name, other in names.items():
        assert any(name in tensor for tensor in tensors)
        tensors = {tensor.replace(name, other): value for tensor, value in tensors.items()}
    save_file(tensors, file)
    driver = drive(it, max_num_seqs=4, adapters={"all": tmp_path / "all"})
    want = answers(it, driver, 2, seed=1, adapters=("all", None))
    assert told(driver, want) == want


# -- configurations

#: Of moonshotai/Kimi-Linear-48B-A3B-Instruct.
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(path, without=(), **changes):
    raw = {name: value for name, value in PUBLISHED.items() if name not in without}
    (path / "config.json").write_text(json.dumps({**raw, **changes}))
    return read_model_config(path)


def test_the_published_configuration(tmp_path):
    config = read(tmp_path)
    full = [index + 1 for index, layer in enumerate(config.layers) if layer.attention is not None]
    assert full == PUBLISHED["linear_attn_config"]["full_attn_layers"]
    assert config.recurrent == GatedDeltaSpec(32, 32, 128, 128, 1e-5, gate_rank=128)
    assert "with a decay of each channel" in config.recurrent.described()
    attention, experts = config.attention, config.layers[1].experts
    assert (attention.rope, attention.scale, attention.head_dim) == (None, 192**-0.5, 576)
    assert (experts.count, experts.routing.per_token, experts.shared_size) == (256, 8, 1024)
    assert config.layers[0].experts is None
    assert config.max_position_embeddings == 1048576
    assert config.projections.num_own == 18, "projections of two kinds of layers, each with an id of its own"


def test_by_default_every_fourth_layer_after_the_first_has_attention(tmp_path):
    config = read(tmp_path, without=["linear_attn_config"], num_hidden_layers=9)
    assert [index for index, layer in enumerate(config.layers) if layer.attention is not None] == [4, 8]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu': .* with silu alone"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax': .*supported: sigmoid"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2: only experts in every layer after the dense ones"),
        ({"mla_use_nope": False}, "mla_use_nope is False: transformers rotates no queries and keys"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True: transformers does not tie them"),
        (
            {"linear_attn_config": {**PUBLISHED["linear_attn_config"], "kda_layers": [1, 2]}},
            r"linear_attn_config\.kda_layers is \[1, 2\]: it and full_attn_layers must have each of the layers 1 to 27",
        ),
        ({"layer_types": ["sliding_attention"] * 27}, "layer_types is .*: sliding_attention is not supported"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8: latents serve all heads"),
        ({"attention_bias": True}, "attention_bias is True: biases are not supported where queries have no latents"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path, changes, why):
    with pytest.raises(UnsupportedModel, match=why):
        read(tmp_path, **changes)


def test_ranks_share_heads(tmp_path):
    config = read(tmp_path, without=["linear_attn_config"], linear_num_heads=6)
    with pytest.raises(UnsupportedModel, match=r"linear_num_heads 6 is not divisible by it; set it to one of 1, 2$"):
        Shard(0, 4).config(config)
    share = Shard(0, 2).config(config)
    assert share.recurrent is not None
    assert (share.recurrent.in_size, share.recurrent.draft_size) == (5 * 3 * 128 + 3, 4 * 3 * 128 + 3)
    assert [each.outputs for each in share.projections.layers[0] if each.path.endswith("_a_proj")] == [128, 128]
