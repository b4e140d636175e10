"""Inkling's attention: learned numbers of distances, log-n scaling of queries, layers with windows of other heads."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from chorus.core.model.families.inkling.family import FlooredLogScaling
from chorus.core.model.families.inkling.ops import TakeRelative
from chorus.core.model.program.ops.attend import Attend
from chorus.core.model.program.ops.heads import Heads
from chorus.core.model.program.text import program_lines
from chorus.core.model.program.torch_heads import log_scaling
from chorus.core.model.program.torch_step import OpContext
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.attention import RelativeSpec, TemperatureTuning
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard

from ..adapters.model_module_forms import Alone
from ..adapters.test_modules_of_every_family import scores_of
from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("inkling", tmp_path)
    return tmp_path


def test_log_scaling_is_transformers_own():
    found = FlooredLogScaling(0.4, 12).factors(40)
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
    assert (sliding.log_scaling, whole.log_scaling) == (None, FlooredLogScaling(0.4, 12))
    assert (sliding.form, whole.form) == ("sliding", "")
    assert whole.scale == 1 / 16
    assert whole.rope is None
    assert (config.logits_scale, config.embedding_rows_eps) == (0.5, 1e-6)
    assert {"profiles"} <= {slot.name for slot in config.composed(config.layers[0]).slots}


def test_windows_with_the_same_heads_are_one_form(tmp_path):
    save_family("inkling-padded", tmp_path)
    config = read_model_config(tmp_path)
    assert [layer.attention.form for layer in config.layers] == ["", ""]
    assert [layer.attention.window for layer in config.layers] == [None, 16]
    assert (config.vocab_size, config.further_embeddings, config.further_logits) == (150, 10, 10)


@pytest.mark.parametrize(("kind", "other"), [("hybrid", "swa_"), ("hybrid_sliding", "")])
def test_heads_of_types_without_layers_are_not_read(model, kind, other):
    unread = {f"{other}num_key_value_heads": 5, f"{other}head_dim": None}
    config = read_model_config(changed(model, layer_types=[kind] * 4, **unread))
    (mixer,) = set(config.attention_layers)
    assert (mixer.num_heads, mixer.form) == ((4, "") if kind == "hybrid" else (6, ""))
    assert len(config.recurrent.heads) == 1


@pytest.mark.parametrize("kernels", ["auto"])
def test_heads_of_odd_widths(tmp_path, drive):
    """Nothing is rotated, so halves of heads have no meaning."""
    save_family("inkling", tmp_path, head_dim=15, swa_head_dim=9)
    it, prompt = Alone(tmp_path, {}), [5, 9, 140, 33, 71, 149, 2, 64, 17, 148, 8] * 3
    driver = drive(it, max_num_seqs=4, max_num_batched_tokens=16)
    answer = driver.run("one", None, prompt, max_tokens=1, prompt_logprobs=1)
    found = [each.logprob for each in answer.prompt_logprobs]
    assert found == pytest.approx(scores_of(it.use(None), prompt).tolist(), abs=1e-4)


def test_factors_of_queries_are_not_rounded(model):
    """transformers multiplies in float32, and rounds once."""
    mixer = read_model_config(model).layers[1].attention
    bound = SimpleNamespace(max_model_len=40, device=torch.device("cpu"), dtype=torch.bfloat16)
    factors = FlooredLogScaling(0.4, 12).factors(40)
    found = log_scaling(mixer, bound)
    assert found is not None
    assert torch.equal(found[:, 0, 0], factors)
    own = replace(mixer, log_scaling=TemperatureTuning(0.1, 8))
    assert log_scaling(own, bound).dtype == torch.bfloat16, "others round them, as transformers does"
    step = SimpleNamespace(
        names={"r": torch.randn(40, 24).bfloat16()}, batch=SimpleNamespace(positions=torch.arange(40))
    )
    TakeRelative("r", "rel", mixer).torch(OpContext(0, {}, bound))(step)
    assert torch.equal(step.names["rel"], (step.names["r"].float() * factors[:, None]).bfloat16())


def test_the_program_and_its_text(model):
    config = read_model_config(model)
    program = config.composed(config.layers[1]).program
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
    assert (share.attention.num_heads, share.recurrent.heads) == (3, ((1, 16), (1, 24)))
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
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads.*swa_num_attention_heads, 6, must be a multiple"),
        ({"num_key_value_heads": 3}, "num_key_value_heads.*: .*num_attention_heads, 4, must be a multiple"),
        ({"swa_head_dim": 1}, "swa_head_dim.*at least 2"),
    ],
    ids=str,
)
def test_what_is_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))
