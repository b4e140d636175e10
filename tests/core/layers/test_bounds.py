"""Step 3.7, whose layers differ in heads of queries and in bounds of what goes into outputs: configuration, refusals.

Layers of Laguna differ in heads, too. For paths, see `paths`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import Activation, BoundedSwiglu
from chorus.core.model.weights.shard import Shard

from ..test_families import executor_of
from ..tiny_families import save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: As published checkpoints have them, of five layers and two for drafts.
LEGACY = {
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "share_expert_dims": 24,
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_layers_enum": "1,2,4",
    "moe_router_scaling_factor": 3.0,
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2],
    "sliding_window": 20,
    "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "swiglu_limits": [0.0, 0.0, 0.0, 0.0, 7.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0, 16.0, 0.0, 0.0],
    "vocab_size": 150,
    "max_position_embeddings": 256,
}  # fmt: skip


def changed(path: Any, **fields: Any) -> Any:
    """A text part with other values of fields; None: without them."""
    raw = json.loads((path / "config.json").read_text())
    text = raw["text_config"] | fields
    raw["text_config"] = {name: value for name, value in text.items() if value is not None}
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.fixture
def model(tmp_path):
    save_family("step-3.7", tmp_path)
    return tmp_path


def test_fields_of_published_checkpoints_are_read_as_by_transformers(tmp_path):
    from transformers import Step3p7Config

    (tmp_path / "theirs").mkdir()
    Step3p7Config(text_config=dict(LEGACY), architectures=["Step3p7ForConditionalGeneration"]).save_pretrained(
        tmp_path / "theirs"
    )
    raw = {"architectures": ["Step3p7ForConditionalGeneration"], "text_config": {**LEGACY, "model_type": "step3p5"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_model_config(tmp_path), read_model_config(tmp_path / "theirs")
    assert ours.layers == theirs.layers
    assert [layer.attention.num_heads for layer in ours.layers] == [4, 6, 6, 6, 4]
    assert [layer.experts is not None for layer in ours.layers] == [False, True, True, False, True]
    last = ours.layers[-1].experts
    assert (last.activation, last.shared_activation) == (BoundedSwiglu(7.0), BoundedSwiglu(16.0))
    assert ours.layers[3].dense.activation == BoundedSwiglu(16.0)
    assert ours.layers[1].experts.activation is Activation.SILU
    assert (ours.layers[0].rope.type, ours.layers[0].rope.dim, ours.layers[0].rope.theta) == ("llama3", 8, 5e6)
    assert (ours.layers[1].rope.type, ours.layers[1].rope.dim, ours.layers[1].rope.theta) == ("default", 16, 1e4)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_draft_layers_are_left_out(tmp_path, prefix):
    raw = {"architectures": ["Step3p7ForConditionalGeneration"], "text_config": LEGACY}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = read_model_config(tmp_path).tensors
    for names in (tensors, *tensors.published):
        assert f"{prefix}layers.6.eh_proj.weight".startswith(names.left_out)
        assert not f"{prefix}layers.4.self_attn.q_proj.weight".startswith(names.left_out)


def test_frequencies_and_scales_are_transformers_own(tiny):
    it = tiny("step-3.7")
    config, base = read_model_config(it.model), it.reference.get_base_model().model.language_model
    for layer, own in zip(config.layers, base.layers, strict=True):
        kind = own.attention_type
        assert torch.equal(layer.rope.inverse_frequencies(), getattr(base.rotary_emb, f"{kind}_inv_freq"))
        assert layer.attention.scale == own.self_attn.scaling
        assert layer.attention.num_heads == own.self_attn.num_heads


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"mlp_bias": True}, "mlp_bias.*shared experts are supported without biases"),
        ({"gating": "per-element"}, "gating.*supported: true, per-head"),
        ({"num_local_experts": 4}, "num_local_experts.*transformers reads n_routed_experts, 16"),
        ({"swiglu_limits": [1.0]}, "swiglu_limits.*1 bounds for num_hidden_layers, 4"),
        ({"swiglu_limits": [-1.0] * 4}, "swiglu_limits.*numbers of at least 0"),
        (
            {"per_layer_config": {"1": {"head_dim": 8}}},
            "per_layer_config.1.head_dim is 8: layers may differ in num_attention_heads",
        ),
        ({"per_layer_config": {"1": {"num_attention_heads": 5}}}, "num_key_value_heads.*5, must be a multiple"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.*an object of full_attention"),
        ({"mlp_layer_types": None, "moe_layers_enum": "1;2"}, "moe_layers_enum.*commas between them"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention.*only causal"),
    ],
    ids=str,
)
def test_what_is_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


@pytest.mark.parametrize("family", ["step-3.7", "laguna-heads"])
def test_ranks_need_equal_shares_of_the_heads_of_all_layers(tmp_path, family):
    save_family(family, tmp_path, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(UnsupportedModel, match="num_attention_heads 6 is not divisible by it"):
        Shard(0, 4).config(read_model_config(tmp_path))


@pytest.mark.parametrize("family", ["step-3.7", "laguna-heads"])
def test_layers_with_other_numbers_of_heads_have_other_pages(tmp_path, family):
    """Where no request can leave a window, too: attention is planned for one number of heads."""
    save_family(family, tmp_path)
    config = read_model_config(tmp_path)
    layout = executor_of(tmp_path, max_model_len=16).layout
    assert layout.group_windows == (None, None)
    for group in layout.groups:
        assert len({config.layers[layer].attention.num_heads for layer in group.layers}) == 1
