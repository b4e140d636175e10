"""MiMo-V2-Flash, whose values are narrower than keys: configuration, pages and refusals. For paths, see `paths`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from chorus.core.model.program.ops.heads import ResizeHeads
from chorus.core.model.program.torch_step import OpContext, Step, batch_of_parts
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel

from ..test_families import executor_of
from ..tiny_families import save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


def changed(path: Any, **fields: Any) -> Any:
    """A configuration with other values of fields; None: without them."""
    raw = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    return path


@pytest.fixture
def model(tmp_path):
    save_family("mimo-v2-flash", tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", ["mimo-v2-flash", "mimo-v2-flash-biased"])
def test_configuration_and_frequencies_are_transformers_own(tiny, family):
    it = tiny(family)
    config, base = read_model_config(it.model), it.reference.get_base_model().model
    for layer, own, kind in zip(config.layers, base.layers, base.config.layer_types, strict=True):
        mixer, attention = layer.attention, own.self_attn
        frequencies = getattr(base.rotary_emb, f"{kind}_original_inv_freq")
        assert torch.equal(mixer.rope.inverse_frequencies(), frequencies)
        assert (mixer.window, mixer.sinks) == ((base.config.sliding_window, True) if mixer.sinks else (None, False))
        assert mixer.sinks == (kind == "sliding_attention") == (attention.sinks is not None)
        assert mixer.value_dim is not None
        values = mixer.num_kv_heads * mixer.value_dim
        assert (values, layer.value_factor) == (attention.v_proj.weight.shape[0], attention.v_scale)


def test_a_family_without_fields_has_the_defaults_of_transformers(model):
    left_out = ("rope_parameters", "layer_types", "mlp_layer_types", "sliding_window", "attention_value_scale")
    config = read_model_config(changed(model, num_hidden_layers=13, head_dim=192, **dict.fromkeys(left_out)))
    assert [index for index, layer in enumerate(config.layers) if layer.attention.window is None] == [0, 5, 11]
    assert [layer.experts is None for layer in config.layers] == [True, *[False] * 12]
    assert {layer.attention.window for layer in config.layers} == {None, 129}
    assert {layer.value_factor for layer in config.layers} == {0.707}
    assert [(rope.theta, rope.dim) for rope in (config.layers[0].rope, config.layers[1].rope)] == [
        (5000000.0, 64),
        (10000.0, 64),
    ]


def test_windows_of_published_checkpoints_do_not_count_the_query(model):
    config = read_model_config(changed(model, sliding_window_size=128, sliding_window=128))
    assert config.window == 129


def test_pages_have_values_as_wide_as_keys(model):
    """Layers with windows have twice the heads; one page has two layers without."""
    layout = executor_of(model).layout
    assert [[(shape.heads, shape.head_dim) for shape in layout.layer_shapes]] == [[(2, 24), (4, 24), (4, 24), (2, 24)]]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"v_head_dim": 32}, "v_head_dim.*values wider than keys, of head_dim 24, are not supported"),
        ({"num_key_value_heads": 4}, "num_attention_heads, 4, must be a multiple of twice as many"),
    ],
)
def test_what_is_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


@pytest.mark.parametrize(("width", "to"), [(2, 3), (3, 2), (3, 1)])
def test_heads_are_cut_or_have_zeros_behind_them(width, to):
    x = torch.arange(2 * (1 + 4 * width), dtype=torch.float32).view(2, -1) + 1
    step = Step(batch_of_parts(), [], {"x": x})
    ResizeHeads("x", "y", 1, width, to).torch(OpContext(0, {}, None))(step)
    kept = min(width, to)
    heads = step.names["y"][:, 1:].view(2, 4, to)
    assert torch.equal(step.names["y"][:, :1], x[:, :1])
    assert torch.equal(heads[..., :kept], x[:, 1:].view(2, 4, width)[..., :kept])
    assert not heads[..., kept:].any()


def test_values_take_their_factor_before_they_are_kept(model):
    config = read_model_config(model)
    names = [type(op).__name__ for op in config.composed(config.layers[0]).program.before]
    assert names.index("Gemm") < names.index("Scale") < names.index("ResizeHeads") < names.index("Heads")
