"""LongCat-Flash: shortcut-connected experts, identity experts, names and refusals. See `paths`, too."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.families.longcat.layer import SHORTCUT
from chorus.core.model.program.ends import end_programs
from chorus.core.model.program.ops.moe import Moe
from chorus.core.model.program.ops.residual import Add
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.shard import Shard
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter

from ..paths.asked import answers, told
from ..test_experts import stack_experts
from ..test_families import executor_of, logits_of
from ..tiny_families import Tiny, load_model, load_peft, make_all_linear, save_family, without_conversion
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

NAME = "longcat-flash"


@pytest.fixture
def model(tmp_path):
    save_family(NAME, tmp_path)
    return tmp_path


@pytest.fixture
def kernels() -> str:
    return "torch"


def test_every_second_layer_has_experts_that_the_next_one_adds(model):
    config = read_model_config(model)
    assert [each.shortcut is not None for each in config.layers] == [True, False, True, False]
    first, second = (config.composed(each).program.ops for each in config.layers[:2])
    assert [op.out for op in first if isinstance(op, Moe)] == [SHORTCUT]
    assert Add("x", SHORTCUT) not in first
    assert second[-1] == Add("x", SHORTCUT)
    assert [each.name for each in end_programs(config).lasting] == [SHORTCUT]
    assert "shortcut ← moe n" in "\n".join(program_lines(config))


def test_a_router_chooses_among_identity_experts_too(model):
    config = read_model_config(model)
    assert (config.experts.count, config.experts.identity, config.experts.choices) == (6, 3, 9)
    assert "gate" not in {each.name for each in config.projections}  # adapters don't change it
    with open_weights(model, config, torch.float32) as weights:
        experts = next(layer["experts"] for layer in weights.layers() if "experts" in layer)
    assert (len(experts.gate_up), len(experts.down), *experts.router.shape) == (6, 6, 9, 64)


@pytest.mark.parametrize("chosen", [0, 4, 6, 8])
def test_an_identity_expert_gives_its_input_back(model, chosen):
    """Every token goes to the same two experts."""
    path = changed(model, moe_topk=2, num_layers=1, routed_scaling_factor=2.0)
    file = path / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if not name.startswith("model.layers.1.")}
    bias = tensors["model.layers.0.mlp.router.e_score_correction_bias"]
    bias.zero_()[[chosen, (chosen + 1) % 9]] = 10
    save_file(tensors, file, {"format": "pt"})
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    want = [load_model(path, dtype=torch.float32)(torch.tensor([each])).logits[0, -1] for each in prompts]
    assert torch.allclose(logits_of(executor_of(path), prompts), torch.stack(want), atol=2e-4)


@pytest.mark.parametrize("form", ["published", "stacked"])
def test_other_forms_of_checkpoints_are_the_same(model, form):
    """Published ones have nothing of identity experts; in memory transformers has their gates and ups in one tensor."""
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    want = logits_of(executor_of(model), prompts)
    if form == "stacked":
        stack_experts(model)
    else:
        file = model / "model.safetensors"
        given = load_file(file)
        identity = {name for name in given if any(f".mlp.experts.{each}." in name for each in (6, 7, 8))}
        assert len(identity) == 2 * 2 * 3
        drafts = {"model.mtp.layers.0.eh_proj.weight": torch.ones(2, 2)}
        save_file({name: each for name, each in given.items() if name not in identity} | drafts, file)
    assert torch.equal(logits_of(executor_of(model), prompts), want)


def test_adapters_are_on_all_that_peft_reaches(drive):
    """PEFT takes all experts' parameters with "all-linear"; its tensors of routers have no effect."""
    it = make_all_linear(NAME)
    manifest = inspect_adapter(it.adapters["all"], read_model_config(it.model).module_paths)
    assert {*manifest.targets} >= {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert manifest.num_left_out == 2 * 2
    given = load_file(it.adapters["all"] / "adapter_model.safetensors")
    assert sum(".classifier." in name for name in given) == 2 * 2
    want = answers(it, driver := drive(it, max_num_batched_tokens=24, max_num_seqs=4), 4, 8, adapters=(None, "all"))
    assert told(driver, want) == want


@without_conversion()
def trained(model, path, **arguments):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **arguments)
    get_peft_model(load_model(model, dtype=torch.float32), lora).save_pretrained(path)
    return path


@pytest.mark.parametrize("parameters", [["experts.gate_up_proj"], ["experts.down_proj", "experts.gate_up_proj"]])
def test_adapters_on_experts_have_matrices_of_identity_ones(model, tmp_path, drive, parameters):
    own = trained(
        model, tmp_path / "own", target_modules=["o_proj"], target_parameters=[f"mlp.{it}" for it in parameters]
    )
    it = Tiny(model, {"own": own}, load_peft)
    want = answers(it, driver := drive(it, max_num_batched_tokens=24, max_num_seqs=4), 4, 8, adapters=(None, "own"))
    assert told(driver, want) == want


def test_adapters_on_some_of_two_layers_under_a_number(model, tmp_path, drive):
    targets = r".*layers\.1\.(self_attn\.1\.(o_proj|q_b_proj)|mlps\.0\.(up|down)_proj)"
    own = trained(model, tmp_path / "own", target_modules=targets)
    manifest = inspect_adapter(own, read_model_config(model).module_paths)
    found = {(layer, module) for part in manifest.parts for layer in part.layers for module in part.targets}
    assert found == {(3, "o_proj"), (3, "q_b_proj"), (2, "up_proj"), (2, "down_proj")}
    it = Tiny(model, {"own": own}, load_peft)
    want = answers(it, driver := drive(it, max_num_batched_tokens=24, max_num_seqs=4), 4, 8, adapters=(None, "own"))
    assert told(driver, want) == want


def test_layers_to_transform_are_numbers_of_both_layers(model, tmp_path):
    own = trained(model, tmp_path / "own", target_modules=["o_proj"], layers_to_transform=[1])
    manifest = inspect_adapter(own, read_model_config(model).module_paths)
    assert {layer for part in manifest.parts for layer in part.layers} == {2, 3}


def test_an_adapter_of_a_layer_beyond_the_last_is_refused(model, tmp_path):
    own = trained(model, tmp_path / "own", target_modules=["o_proj"])
    config = read_model_config(changed(model, num_layers=1))
    with pytest.raises(AdapterFormatError, match=r"the base model has 2 layers"):
        inspect_adapter(own, config.module_paths)


def test_ranks_refuse_identity_experts(model):
    config = read_model_config(model)
    with pytest.raises(UnsupportedModel, match="identity experts would be added by every rank"):
        Shard(0, 2).config(config)
    config = read_model_config(changed(model, zero_expert_num=0))
    assert Shard(0, 2).config(config).experts.size == 20


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"head_dim": 16}, "head_dim.*16 elements would rotate"),
        ({"qk_head_dim": 32}, "qk_head_dim.*together, 24"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"router_bias": True}, "router_bias.*leaves the router's bias out"),
        ({"moe_topk": 1}, "moe_topk.*fewer than 2"),
        ({"moe_topk": 10}, "moe_topk.*9 together"),
        ({"num_hidden_layers": 3}, "num_hidden_layers.*multiple"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ],
    ids=str,
)
def test_fields_that_transformers_does_not_compute_are_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


@pytest.mark.parametrize(
    "fields", [{"num_hidden_layers": 2}, {"num_layers": 1}, {"num_layers": 3, "num_hidden_layers": 2}]
)
def test_numbers_of_layers_are_transformers_own(model, fields):
    from transformers import AutoConfig

    path = changed(model, **fields)
    assert read_model_config(path).num_layers == AutoConfig.from_pretrained(path).num_hidden_layers == 2
