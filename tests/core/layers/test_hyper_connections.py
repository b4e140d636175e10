"""Hyper-connections (HY V4): their formula, names of checkpoints, and what is refused. For paths, see `paths`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.program.layer_program import Kept
from chorus.core.model.program.ops.hyper import ConnectStreams, GiveToStreams, SumStreams
from chorus.core.model.program.text import program_lines
from chorus.core.model.program.torch_step import Bound, OpContext, Step, batch_of_parts
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.hyper_connections import HyperConnectionSpec
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.tensor_parts import tensor_shapes

from ..test_families import executor_of, logits_of
from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

HY_V4, PROMPTS = "hy-v4", [list(range(3, 43)), [9, 8, 7]]


@pytest.fixture
def model(tmp_path):
    save_family(HY_V4, tmp_path / "model")
    return tmp_path / "model"


def run(op, names, weights, model=None):
    """Run an op alone, on these buffers."""
    bound = Bound(None, None, [], [], [], [], 1, 8, torch.float32, torch.device("cpu")) if model is None else model
    op.torch(OpContext(0, weights, bound))(Step(batch_of_parts(), [weights], names))
    return names


def connected(spec, fn, base, scale, streams, given):
    """What a part takes of streams, and the streams after it has given."""
    slots = ("attn_hyper", "attn_hyper_base", "attn_hyper_scale")
    mix = "mix" if spec.rounds else None
    names = run(
        ConnectStreams(spec, *slots, "take", "give", mix),
        {"s": streams},
        dict(zip(slots, (fn, base, scale), strict=True)),
    )
    run(SumStreams("p", "take"), names, {})
    return names["p"], run(GiveToStreams("y", "give", mix), {**names, "y": given}, {})["s"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_takes_and_gives_as_transformers_module_says(dtype):
    from transformers import HYV4Config
    from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

    torch.manual_seed(0)
    config = HYV4Config(hidden_size=24, hc_mult=3, hc_magnitude=1.3, hc_eps=0.01, rms_norm_eps=0.02)
    module = HYV4HyperConnection(config)
    with torch.no_grad():
        for each in module.parameters():
            each.normal_(0, 0.4)
    streams, given = torch.randn(5, 3, 24, dtype=dtype), torch.randn(5, 24, dtype=dtype)
    with torch.no_grad():
        post, taken = module(streams[None])
        wide = post[0].float()[..., None] * given.float()[:, None] + streams.float()
    spec = HyperConnectionSpec(3, 0.02, 0.01, magnitude=1.3, given_floor=0.01)
    found = connected(spec, module.fn.data, module.base.data, module.scale.data, streams.clone(), given)
    assert torch.allclose(found[0], taken[0], rtol=1e-5, atol=1e-6)
    assert torch.allclose(found[1], wide.to(dtype), rtol=1e-5, atol=1e-6)


def test_what_a_mixer_gives_lives_across_it_in_float32(model):
    config = read_model_config(model)
    for layer in config.layers:
        assert Kept("give", (3,), is_wide=True) in config.composed(layer).program.reads


def test_a_program_says_how_streams_are_connected(model):
    text = "\n".join(program_lines(read_model_config(model)))
    assert "3 streams, all of them x" in text
    assert "take, give ← connect_streams s" in text
    assert "numbers of 3 streams, eps 1e-05: attn_hyper" in text
    assert "p ← sum_streams take s" in text
    assert "s ← s + give ⊗ y" in text
    assert "joined ← sum_streams take s" in text
    assert "16 heads of 24, rotated by a yarn rope of base 10000" in text


def test_every_rank_has_all_connections_and_a_share_of_gates(model):
    whole = read_model_config(model)
    share = Shard(1, 2).config(whole)
    assert share.streams == whole.streams
    assert (whole.attention.gate_size, share.attention.gate_size) == (128, 64)
    assert whole.streams.num_weights(64, 4) == 3 * 64 * (2 * 4 * 6 + 3)


def renamed(model, out, names):
    """A checkpoint with other names of tensors: each part of a name is another one."""
    out.mkdir()
    found = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        new = name
        for own, other in names.items():
            new = new.replace(own, other)
        found[new] = tensor
    save_file(found, out / "model.safetensors")
    (out / "config.json").write_text((model / "config.json").read_text())
    return found


IN_MEMORY = {
    ".hc_pre.hc_": ".hc_",
    ".hc_attn_layer.hc_": ".attn_hc.",
    ".hc_mlp_layer.hc_": ".ffn_hc.",
    ".hc_head.hc_head_": ".hc_head.hc_",
    ".learnable_sink_param": ".sinks",
    ".linear_gate": ".gate_proj",
}
OTHERS = {
    "memory": {},
    "layers": {".attn_hc.": ".hc_attn_layer.hc_", ".ffn_hc.": ".hc_mlp_layer.hc_", ".sinks": ".learnable_sink_param"},
    "inner": {
        ".attn_hc.": ".hc_attn_layer.hc_pre.hc_",
        ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
        ".hc_head.hc_": ".hc_head.hc_head_",
        ".self_attn.gate_proj": ".self_attn.linear_gate",
    },
}
"""Names of checkpoints that transformers takes, in place of those in memory."""


@pytest.mark.parametrize("names", OTHERS)
def test_checkpoints_may_have_other_names(model, tmp_path, names):
    """Than those with which transformers saves them."""
    want = logits_of(executor_of(model, dtype="float32"), PROMPTS)
    plain = renamed(model, tmp_path / "memory", IN_MEMORY)
    assert {"model.layers.0.attn_hc.fn", "model.hc_head.hc_scale", "model.layers.1.self_attn.sinks"} < {*plain}
    path = tmp_path / "memory"
    if others := OTHERS[names]:
        path = tmp_path / "other"
        assert not {*renamed(tmp_path / "memory", path, others)} & {"model.layers.0.attn_hc.fn"}
    assert torch.equal(logits_of(executor_of(path, dtype="float32"), PROMPTS), want)


def test_random_weights_need_no_checkpoint(model):
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert logits_of(executor_of(model, load_format="dummy"), [[3, 4, 5]]).isfinite().all()


def test_draft_layers_are_left_out(model):
    file = model / "model.safetensors"
    want = logits_of(executor_of(model, dtype="float32"), PROMPTS)
    save_file({**load_file(file), "model.mtp_layers.0.eh_proj.weight": torch.ones(2, 2)}, file)
    assert torch.equal(logits_of(executor_of(model, dtype="float32"), PROMPTS), want)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hc_mult": 0}, "hc_mult is 0: a whole number of at least 1"),
        ({"swiglu_limit": -1.0}, r"swiglu_limit is -1\.0: a finite number above 0"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "no layer before the first one has chosen tokens"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu': not supported"),
        ({"mlp_layer_types": ["dense"] * 3}, "3 types for num_hidden_layers, 4"),
    ],
)
def test_configurations_that_are_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


def test_one_indexer_serves_four_layers_by_default(model):
    from transformers import AutoConfig

    path = changed(model, indexer_types=None, num_hidden_layers=11, mlp_layer_types=None, layer_types=None)
    found = ["shared" if it.indexer is None else "full" for it in read_model_config(path).attention_layers]
    assert found == AutoConfig.from_pretrained(path).indexer_types
    assert [bool(layer.experts) for layer in read_model_config(path).layers] == [False] + [True] * 10


def test_the_published_configuration(tmp_path):
    """Of transformers' defaults."""
    shape = {"vocab_size": 120832, "hidden_size": 2816, "num_hidden_layers": 34, "num_attention_heads": 32}
    raw = {"architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "dtype": "bfloat16", **shape}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    assert config.streams == HyperConnectionSpec(4, 1e-5, 1e-6, magnitude=2.0, given_floor=1e-6)
    assert (config.attention.top_k, config.attention.indexer.heads, config.experts.count) == (2048, 16, 256)
    shapes = tensor_shapes(config)
    assert shapes["model.layers.3.ffn_hc.fn"] == (8, 4 * 2816)
    assert shapes["model.hc_head.hc_fn"] == (4, 4 * 2816)
