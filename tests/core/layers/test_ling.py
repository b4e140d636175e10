"""Ling 2.6, whose layers are of Kimi Delta Attention without latents of gates, or of latent attention with a gate of
each head: names and configurations. For paths, see `paths`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.memory.files.format import inspect_adapter

from ..tiny_families import make_all_linear, save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("ling-2.6", tmp_path)
    return tmp_path


def test_what_all_linear_reaches():
    it = make_all_linear("ling-2.6")
    delta = [f"{each}_proj@linear" for each in "qkvgo"]
    latents, shared = (
        ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj"],
        ("gate_proj", "up_proj", "down_proj"),
    )
    found = set(inspect_adapter(it.adapters["all"], read_model_config(it.model).module_paths).targets)
    assert found == {*delta, "b_proj", "f_proj", *latents, *shared, *(f"shared_expert.{each}" for each in shared)}


def test_the_defaults_are_transformers_own(tmp_path):
    from transformers import BailingHybridConfig

    raw = {"architectures": ["BailingHybridForCausalLM"], "vocab_size": 150, "hidden_size": 64, "num_hidden_layers": 7}
    raw |= {"num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = read_model_config(tmp_path)
    BailingHybridConfig(**raw).save_pretrained(tmp_path)
    theirs = read_model_config(tmp_path)
    assert ours.layers == theirs.layers
    assert [index for index, layer in enumerate(ours.layers) if layer.attention is not None] == [5]
    assert [layer.experts is None for layer in ours.layers] == [True, True, *[False] * 5]
    assert (ours.recurrent.bound, ours.recurrent.k_dim, ours.recurrent.num_k_heads) == (-5.0, 128, 32)
    assert ours.attention.rope.theta == 6000000.0


def test_names_of_published_checkpoints(model):
    fields = {"num_experts": 16, "num_experts_per_tok": 3, "n_shared_experts": 1, "max_position_embeddings": 256}
    others = {"num_experts_per_token": 3, "num_shared_experts": 1, "model_max_length": 256}
    want = read_model_config(model)
    assert (
        read_model_config(changed(model, **dict.fromkeys(fields), **others, num_local_experts=16)).layers == want.layers
    )


def test_draft_layers_are_left_out(model):
    tensors = read_model_config(model).tensors
    for names in (tensors, *tensors.published):
        assert "model.layers.4.eh_proj.weight".startswith(names.left_out)
        assert not "model.layers.3.mlp.gate.weight".startswith(names.left_out)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden_act": "gelu"}, "hidden_act.*with silu alone"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings.*transformers does not tie them"),
        ({"kda_lower_bound": 0.5}, "kda_lower_bound.*a finite number below 0"),
        ({"linear_conv_kernel_dim": 1}, "short_conv_kernel_size.*at least 2"),
        ({"attention_bias": True}, "attention_bias.*where queries have no latents"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types.*sliding_attention is not supported"),
    ],
    ids=str,
)
def test_what_is_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


def test_ranks_share_heads_and_their_gates(model):
    config = read_model_config(model)
    share = Shard(0, 2).config(config)
    mixers = [(spec.share(2).attention, spec.attention) for spec in config.layers if spec.attention]
    heads = [[each.latent.input_gate(each.output_gate) * each.num_heads for each in both] for both in mixers]
    assert heads == [[2, 4], [2, 4]]
    assert share.recurrent.num_decays == config.recurrent.num_decays // 2


def test_the_native_decoder_names_what_it_lacks(model):
    config = read_model_config(model)
    layers = [
        replace(layer, mixer=replace(layer.recurrent, sigmoid_gates=True)) if layer.recurrent else layer
        for layer in config.layers
    ]
    why = why_unsupported(replace(config, layers=tuple(layers)), torch.float32)
    assert "gates of sigmoids" in (why or "")
