"""Families whose layers have attention and a recurrent mixer side by side: pieces, adapters and configurations."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.recurrent import MambaSpec
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.core.model.weights.shard import WHOLE, Shard
from chorus.core.model.weights.tensor_parts import tensor_shapes
from chorus.core.model.weights.weight_loader import WeightLoader
from chorus.graphs.runner import StepMode
from chorus.memory.files.format import inspect_adapter
from chorus.ops.mixers.mamba2 import MambaWeights
from chorus.ops.mixers.recurrent import RecurrentState

from ...conftest import quiet
from ...kept import KeptAnswers, kept_files
from ..adapters.model_module_forms import Alone
from ..merging.test_merged import merge
from ..paths.asked import answers, told
from ..test_families import executor_of
from ..tiny_families import ATTENTION, MLP, TWO_MIXERS, load_peft, save_family, train_vectors
from .test_hybrids import Runner

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

EVERY_MODULE = [*ATTENTION, *MLP, "in_proj", "out_proj"]

#: name → arguments of `LoraConfig`.
FORMS = {
    **{module: {"target_modules": [module], "r": 4} for module in EVERY_MODULE},
    "all": {"target_modules": EVERY_MODULE, "r": 3},
    "dora": {"target_modules": EVERY_MODULE, "r": 5, "use_dora": True},
    "biases": {"target_modules": EVERY_MODULE, "r": 2, "bias": "lora_only"},
    "lora-bias": {"target_modules": EVERY_MODULE, "r": 2, "lora_bias": True},
}


def with_out_proj() -> AbstractContextManager[Any]:
    """PEFT refuses LoRA on out_proj of this model, because fused kernels for training pass over it."""
    return patch("peft.tuners.tuners_utils._check_lora_target_modules_mamba", lambda *_: None)


@quiet()
@with_out_proj()
def save_forms(root):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    save_family("falcon-h1-biased", root / "model")
    for name, arguments in FORMS.items():
        torch.manual_seed(sum(map(ord, name)))
        lora = LoraConfig(lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **arguments)
        peft = get_peft_model(AutoModelForCausalLM.from_pretrained(root / "model"), lora)
        train_vectors(peft)
        peft.save_pretrained(root / name)


@with_out_proj()
def load_forms(path, adapters):
    return load_peft(path, adapters)


@pytest.fixture(scope="module")
def it():
    root = kept_files("forms falcon-h1", save_forms)
    return Alone(root / "model", {name: root / name for name in FORMS}, load_forms, KeptAnswers(root))


every_family = pytest.mark.parametrize("family", TWO_MIXERS)


@every_family
@pytest.mark.parametrize("piecewise", [False, True], ids=["forward", "pieces"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_any_size(tiny, family, chunk, piecewise):
    it = tiny(family)
    prompt, want = it.case(None, 60, seed=5)
    assert Runner(it.model, piecewise).greedy(prompt, chunk, len(want)) == want


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.native)])
def test_adapters_on_every_linear_module(it, drive, ranks):
    """On each alone and on all, with DoRA, and with biases: factors come after what adapters add."""
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, tensor_parallel_size=ranks)
    want = answers(it, driver, 1 + len(FORMS), seed=4, adapters=(None, *FORMS))
    assert told(driver, want) == want


@pytest.mark.parametrize("adapter", ["all", "dora", "lora-bias"])
def test_adapters_on_both_mixers_are_merged(it, drive, adapter):
    driver = drive(it, max_num_seqs=4, max_num_batched_tokens=24)
    merge(driver, adapter)
    want = answers(it, driver, 3, seed=6, adapters=(None, adapter, "in_proj"))
    assert told(driver, want) == want
    assert StepMode.MERGED in {plan.mode for plan in driver.plans}


def test_each_layer_has_keys_and_values_and_a_state(tiny):
    config = read_model_config(tiny("falcon-h1").model)
    assert (config.num_layers, len(config.kv_layers), config.num_recurrent_layers) == (2, 2, 2)
    layout = executor_of(tiny("falcon-h1").model, dtype="float32").layout
    assert (layout.num_layers, layout.states.shape.num_layers) == (2, 2)
    targets = inspect_adapter(tiny("falcon-h1").adapters["r3-all"], config.module_paths).parts
    assert {name for part in targets for name in part.targets} == {*ATTENTION, *MLP, "in_proj"}
    assert {layer for part in targets for layer in part.layers} == {0, 1}


def test_falcon_h1_as_it_is_published(tmp_path):
    """The fields of Falcon-H1-0.5B, some of which transformers does not read."""
    published = {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_bias": False,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "embedding_multiplier": 5.656854249492381,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "key_multiplier": 0.390625,
        "lm_head_multiplier": 0.0390625,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_ssm": 1536,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 24,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "max_position_embeddings": 16384,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "model_type": "falcon_h1",
        "num_attention_heads": 8,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32784,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = read_model_config(tmp_path)
    assert config.recurrent == MambaSpec(24, 64, 1, 128, eps=1e-5, gates_norm=None, out_bias=False)
    assert config.attention.scale == 0.125 * 0.390625
    assert config.attention.rope == RopeConfig(64, 1e11)
    assert (config.embedding_multiplier, config.logits_scale) == (5.656854249492381, 0.0390625)
    assert round(sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values()) / 1e9, 2) == 0.52


def test_ranks_have_shares_of_both_mixers(tiny):
    config = read_model_config(tiny("falcon-h1").model)
    share = Shard(1, 2).config(config).layers[0]
    assert share.attention is not None
    assert share.attention.num_heads == 2
    assert share.beside.mixer == MambaSpec(4, 12, 1, 16, eps=1e-5, gates_norm=None, out_bias=False)
    assert share.beside.in_factor == 1.3


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)])
def test_factors_of_columns_are_those_of_their_sections(tiny, shard):
    path = tiny("falcon-h1").model
    config = read_model_config(path)
    second = config.layers[0].beside
    assert len(set(second.section_factors)) > 1
    (inputs,) = (each for each in config.projections.layers[0] if each.product == "mixer_in")
    _, sections = inputs.share(shard.rank, shard.size)
    widths = [each.stop - each.start for each in sections]
    want = [factor for factor, width in zip(second.section_factors, widths, strict=True) for _ in range(width)]
    (first, *_) = WeightLoader(path, config, torch.float32, shard=shard).layers()
    assert first["mixer_factors"].tolist() == torch.tensor(want).tolist()


@pytest.mark.parametrize("gates_norm", [False, True])
def test_a_gate_may_come_after_the_norm(gates_norm):
    torch.manual_seed(0)
    conv, each, norm = torch.randn(4, 12), torch.randn(2), torch.rand(4)
    weights = MambaWeights(conv, None, each, each, each, norm, 1e-5, 2, gates_norm=gates_norm)
    rows, mixed = torch.randn(3, 18), torch.randn(3, 4)
    gate = torch.nn.functional.silu(rows[:, :4])
    own = (mixed if gates_norm else mixed * gate).unflatten(1, (2, 2))
    want = (own * torch.rsqrt(own.square().mean(-1, keepdim=True) + 1e-5)).flatten(1) * norm
    torch.testing.assert_close(weights.output(mixed, rows, None), want * gate if gates_norm else want)
    state = RecurrentState(torch.zeros(1, 3, 12), torch.zeros(1, 2, 2, 2))
    assert weights.draft_inputs(rows, state).shape == (3, 14)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"ssm_multipliers": [1.0]}, "ssm_multipliers is .*: 5 numbers are needed"),
        ({"mlp_multipliers": [1.0, 2.0, 3.0]}, "mlp_multipliers is .*: 2 numbers are needed"),
        ({"key_multiplier": 0.0}, "key_multiplier is 0.0: a finite number above 0"),
        ({"mamba_d_ssm": 100}, "mamba_d_ssm, 100"),
        ({"mamba_n_groups": 3}, "mamba_n_groups"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "silu alone"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_computed_is_refused(it, tmp_path, values, match):
    config = json.loads((it.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(UnsupportedModel, match=match):
        read_model_config(tmp_path)
