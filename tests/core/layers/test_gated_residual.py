"""Muse Spark, whose residual stream has gates and whose experts read latents: configuration, formulas and refusals. For
paths, see `paths`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from chorus.core.model.families.muse.ops import gate_factors
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.ops.elementwise.elementwise import scaled_norm

from ..tiny_families import save_family
from .test_bounds import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("muse-spark", tmp_path)
    return tmp_path


def reference(tiny: Any) -> Any:
    return tiny("muse-spark").reference.get_base_model().model.language_model


def test_factors_of_the_residual_stream_are_transformers_own(tiny):
    gate, x = reference(tiny).layers[1].post_attention_residual_gate, torch.randn(3, 64)
    alpha, beta = gate_factors(gate.gate.detach(), gate.temperature)
    assert torch.equal(gate(x, 2 * x), alpha * x + beta * (2 * x))
    assert alpha.min() >= 0.001**0.5
    large, _ = gate_factors(torch.tensor([9.0, -9.0]), 0.3)
    assert torch.allclose(large, torch.tensor([0.001**0.5, 1.0]))


def test_a_norm_that_scales_first_is_transformers_own(tiny):
    norm, x = reference(tiny).layers[1].post_feedforward_layernorm, torch.randn(3, 64)
    for dtype in (torch.float32, torch.bfloat16):
        rows = x.to(dtype)
        want = norm(rows)
        torch.testing.assert_close(scaled_norm(rows, 1 + norm.weight.detach().float(), norm.eps), want)


def test_layers_as_transformers_has_them(tiny):
    it = tiny("muse-spark")
    config = read_model_config(it.model)
    for spec, own in zip(config.layers, reference(tiny).layers, strict=True):
        assert (spec.attention.window is None) == (own.self_attn.sliding_window is None)
        assert spec.head_eps == own.self_attn.o_norm.eps
        assert spec.temperature == own.post_attention_residual_gate.temperature
        assert (spec.experts is not None) == hasattr(own.mlp, "experts")
    assert config.experts.latent.size == 24
    assert config.experts.routing.logits_factor == pytest.approx(0.1767766952966369)
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True]


def test_defaults_are_transformers_own(tmp_path):
    from transformers import MuseSparkConfig

    raw = {"architectures": ["MuseSparkForConditionalGeneration"], "text_config": {"num_hidden_layers": 6}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = read_model_config(tmp_path)
    MuseSparkConfig(**raw).save_pretrained(tmp_path)
    theirs = read_model_config(tmp_path)
    assert (ours.layers, ours.vocab_size, ours.eos_token_ids) == (
        theirs.layers,
        theirs.vocab_size,
        theirs.eos_token_ids,
    )


def test_ranks_are_refused(model):
    with pytest.raises(UnsupportedModel, match="each expert's output is normalised"):
        Shard(0, 2).config(read_model_config(model))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_attention_heads": 6}, "hidden_size.*multiples of num_attention_heads"),
        ({"layer_rope_theta": [1.0]}, "layer_rope_theta.*1 bases for num_hidden_layers, 4"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok.*can't be more than that"),
    ],
    ids=str,
)
def test_what_is_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))
