"""Adapters of Tinker, which trains modules that a base model has in one matrix, or does not have at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import open_unchanged, with_content, with_effect
from chorus.memory.files.peft_names import tensor_shapes

from ..paths.asked import answers
from ..tiny_families import Tiny, load_peft, make_tiny
from ..tiny_mixtures import make_mixture
from .test_adapter_forms import told
from .test_expert_adapters import values_of

pytestmark = [pytest.mark.native, pytest.mark.wide]

RANK, ALPHA = 2, 6
SLICES = ("q", "k", "v")


def write(path: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    path.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", **fields}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def linear_layers(config):
    """The layers with Gated DeltaNet, and its projection of queries, keys and values."""
    at = [layer for layer, own in enumerate(config.projections.layers) if any(p.name == "in_proj_qkv" for p in own)]
    return at, config.projections["in_proj_qkv"]


def tinkers(config, slices=SLICES):
    """Slices of the projection, and what else is trained in these layers."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    layers, projection = linear_layers(config)
    sizes = dict(zip(SLICES, projection.sections, strict=True))
    out = config.projections["out_proj"]

    def put(layer, name, d_in, d_out):
        at = f"base_model.model.model.layers.{layer}.linear_attn.{name}"
        tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, d_in, generator=generator) / 3
        tensors[f"{at}.lora_B.weight"] = torch.randn(d_out, RANK, generator=generator) / 3

    for layer in layers:
        for name in slices:
            put(layer, f"in_proj_{name}", projection.inputs, sizes[name])
        put(layer, "out_proj", out.inputs, out.outputs)
    return tensors


def joined(config, tensors, slices=SLICES):
    """The same on the whole projection, whose rank is the sum of ranks, as PEFT reads it."""
    layers, projection = linear_layers(config)
    found = dict(tensors)
    for layer in layers:
        at = f"base_model.model.model.layers.{layer}.linear_attn.in_proj_"
        a = [found.pop(f"{at}{name}.lora_A.weight") for name in slices]
        b = [found.pop(f"{at}{name}.lora_B.weight") for name in slices]
        blocks = torch.zeros(projection.outputs, RANK * len(slices))
        starts = dict(zip(SLICES, (0, projection.sections[0], sum(projection.sections[:2])), strict=True))
        for index, (name, block) in enumerate(zip(slices, b, strict=True)):
            blocks[starts[name] : starts[name] + len(block), RANK * index : RANK * (index + 1)] = block
        found |= {f"{at}qkv.lora_A.weight": torch.cat(a), f"{at}qkv.lora_B.weight": blocks}
    return found


def as_peft(path: Path, config, tensors, slices=SLICES) -> Path:
    return write(
        path,
        joined(config, tensors, slices),
        target_modules=["in_proj_qkv", "out_proj"],
        rank_pattern={"in_proj_qkv": RANK * len(slices)},
        alpha_pattern={"in_proj_qkv": ALPHA * len(slices)},
    )


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_slices_give_peft_s_tokens_of_the_whole(drive, tmp_path):
    model = make_tiny("qwen3.5").model
    config = read_model_config(model)
    tensors = tinkers(config)
    some = tinkers(config, ("q", "v"))
    names = [f"in_proj_{name}" for name in SLICES]
    own = {
        "all": write(tmp_path / "tinker" / "all", tensors),
        "listed": write(tmp_path / "tinker" / "listed", tensors, target_modules=[*names, "out_proj"]),
        "some": write(tmp_path / "tinker" / "some", some),
    }
    peft = {
        name: as_peft(tmp_path / "peft" / name, config, it, slices)
        for name, it, slices in (("all", tensors, SLICES), ("listed", tensors, SLICES), ("some", some, ("q", "v")))
    }
    it = Tiny(model, peft, load_peft)
    driver = drive(it, max_num_seqs=4, max_num_batched_tokens=24, block_tokens=8, adapters=own)
    assert {part.rank for part in driver.engine.store.get("some").manifest.parts} == {RANK, 2 * RANK}
    want = answers(it, driver, 3, seed=1, adapters=(*own, None), lengths=(5, 30))
    assert told(driver, want) == want


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_slices_are_the_whole_s_values_in_pages(tmp_path, family):
    config = read_model_config(make_mixture(family).model if family == "qwen3-next" else make_tiny(family).model)
    tensors = tinkers(config)
    one, found = values_of(write(tmp_path / "own", tensors), config, None)
    other, want = values_of(as_peft(tmp_path / "peft", config, tensors), config, None)
    assert one.parts == other.parts
    assert torch.equal(found, want)


def unequal(config):
    """Slices of different ranks, and the same as PEFT reads them, with factors in B where scales differ."""
    generator, own, whole = torch.Generator().manual_seed(5), {}, {}
    layers, projection = linear_layers(config)
    ranks, alphas = {"q": 3, "k": RANK, "v": 5}, {"q": ALPHA, "k": ALPHA, "v": 4}
    sizes = dict(zip(SLICES, projection.sections, strict=True))
    for layer in layers:
        at, blocks = f"base_model.model.model.layers.{layer}.linear_attn.in_proj_", []
        for name in SLICES:
            a = torch.randn(ranks[name], projection.inputs, generator=generator) / 3
            b = torch.randn(sizes[name], ranks[name], generator=generator) / 3
            own |= {f"{at}{name}.lora_A.weight": a, f"{at}{name}.lora_B.weight": b}
            blocks.append(b * (alphas[name] / ranks[name]))
        whole[f"{at}qkv.lora_A.weight"] = torch.cat([own[f"{at}{name}.lora_A.weight"] for name in SLICES])
        whole[f"{at}qkv.lora_B.weight"] = torch.block_diag(*blocks)
    patterns = {
        "rank_pattern": {f"in_proj_{name}": rank for name, rank in ranks.items() if rank != RANK},
        "alpha_pattern": {"in_proj_v": 4},
    }
    return own, patterns, whole, sum(ranks.values())


@pytest.mark.parametrize("targets", ["all-linear", [f"in_proj_{name}" for name in SLICES]])
def test_slices_of_unequal_ranks_and_scales(tmp_path, targets):
    """Each has the rank and alpha that the patterns say; where scales differ, B has their quotients."""
    config = read_model_config(make_tiny("qwen3.5").model)
    own, patterns, whole, rank = unequal(config)
    one, found = deltas(write(tmp_path / "own", own, target_modules=targets, **patterns), config)
    peft = {"target_modules": ["in_proj_qkv"], "r": rank, "lora_alpha": rank}
    other, want = deltas(write(tmp_path / "peft", whole, **peft), config)
    assert {part.rank for part in one.parts} == {part.rank for part in other.parts} == {rank}
    for key, value in want.items():
        torch.testing.assert_close(found[key], value)


def deltas(path, config):
    """What an adapter adds to each weight, as it is read."""
    manifest, found = with_content(inspect_adapter(path, config.module_paths)), {}
    with open_unchanged(manifest) as file:
        for part in manifest.parts:
            for layer in part.layers:
                for name in part.targets:
                    shapes = tensor_shapes(layer, config.projections[name], part.rank)
                    a, b = (file.matrix(*each, torch.empty(1 << 20, dtype=torch.uint8)).clone() for each in shapes)
                    found[layer, name] = part.scale * b @ a
    return manifest, found


@pytest.mark.parametrize("family", ["nemotron-h", "nemotron-3"])
def test_gates_and_inputs_of_mamba(tmp_path, family):
    """Which Tinker trains apart: the first two parts of in_proj, which has B, C and time steps, too."""
    config = read_model_config((make_mixture if family == "nemotron-3" else make_tiny)(family).model)
    projection = config.projections["in_proj"]
    gate, size, *_ = projection.sections
    generator, own, whole = torch.Generator().manual_seed(6), {}, {}
    for layer in config.projections.layers_of("in_proj"):
        at = f"base_model.model.model.layers.{layer}.mixer"
        b = torch.zeros(projection.outputs, 2 * RANK)
        for index, (name, rows) in enumerate((("gate_proj", gate), ("x_proj", size))):
            own[f"{at}.{name}.lora_A.weight"] = torch.randn(RANK, projection.inputs, generator=generator)
            own[f"{at}.{name}.lora_B.weight"] = part = torch.randn(rows, RANK, generator=generator)
            b[gate * index : gate * index + rows, RANK * index : RANK * (index + 1)] = part
        whole[f"{at}.in_proj.lora_A.weight"] = torch.cat(
            [own[f"{at}.{name}.lora_A.weight"] for name in ("gate_proj", "x_proj")]
        )
        whole[f"{at}.in_proj.lora_B.weight"] = b
    one, found = values_of(write(tmp_path / "own", own), config, None)
    fields = {"target_modules": ["in_proj"], "r": 2 * RANK, "lora_alpha": 2 * ALPHA}
    other, want = values_of(write(tmp_path / "peft", whole, **fields), config, None)
    assert one.parts == other.parts
    assert torch.equal(found, want) and found.any()


def test_slices_have_an_effect_if_one_has(tmp_path):
    """Training may leave one of them as it was, with a B of zeros."""
    config = read_model_config(make_tiny("qwen3.5").model)
    tensors = {
        name: tensor * (not name.endswith(("in_proj_q.lora_B.weight", "out_proj.lora_B.weight")))
        for name, tensor in tinkers(config).items()
    }
    assert not with_effect(inspect_adapter(write(tmp_path / "own", tensors), config.module_paths)).no_effect


def spoiled(end, *shape):
    def spoil(tensors):
        name = next(name for name in tensors if name.endswith(end))
        if shape:
            tensors[name] = torch.zeros(shape)
        else:
            del tensors[name]

    return spoil


SLICES_REFUSED = {
    "other rows": (spoiled("in_proj_k.lora_B.weight", 5, RANK), {}, r"in_proj_k\.lora_B.* shape \[5, 2\], \["),
    "other ranks": (spoiled("in_proj_k.lora_A.weight", 3, 64), {}, r"in_proj_k\.lora_B.* shape \[32, 2\], \[32, 3\]"),
    "no B": (spoiled("in_proj_v.lora_B.weight"), {}, r"in_proj_v\.lora_B.* is missing"),
    "not targeted": (None, {"target_modules": ["in_proj_q", "in_proj_v", "out_proj"]}, r"in_proj_k .* is not targeted"),
    "not there": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "in_proj_k" in name],
        {"target_modules": ["in_proj_q", "in_proj_k", "in_proj_v", "out_proj"]},
        r"in_proj_k .* is missing",
    ),
    "not the rank of the configuration": (
        None, {"rank_pattern": {"in_proj_q": 4}}, r"in_proj_q\.lora_A.*: its rank is 2, by .* it is 4",
    ),
    "no alpha of one": (None, {"lora_alpha": 0, "alpha_pattern": {"in_proj_k": 4}}, r"alpha_pattern .* alpha 0"),
    "DoRA": (
        lambda tensors: tensors.update({
            f"base_model.model.model.layers.0.linear_attn.in_proj_k.{end}": torch.ones(32)
            for end in ("lora_magnitude_vector", "lora_B.bias")
        }),
        {},
        r"in_proj_k\.lora_.* is unexpected",
    ),
    "and the whole": (
        lambda tensors: tensors.update({
            "base_model.model.model.layers.0.linear_attn.in_proj_qkv.lora_A.weight": torch.zeros(RANK, 64)
        }),
        {},
        r"in_proj_qkv.* a second time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SLICES_REFUSED)
def test_slices_that_are_refused(tmp_path, case):
    spoil, fields, why = SLICES_REFUSED[case]
    config = read_model_config(make_tiny("qwen3.5").model)
    tensors = tinkers(config)
    if spoil is not None:
        spoil(tensors)
    with pytest.raises(AdapterFormatError, match=why):
        inspect_adapter(write(tmp_path / "own", tensors, **fields), config.module_paths)


@pytest.mark.parametrize("targets", ["all-linear", ["out_proj", "lm_head"], ["out_proj", "unembed_tokens"]])
def test_a_head_inside_the_model(tmp_path, targets):
    config = read_model_config(make_tiny("qwen3.5").model)
    head = {
        "lora_A.weight": torch.randn(RANK, config.hidden_size),
        "lora_B.weight": torch.randn(config.vocab_size, RANK),
    }
    tensors = {name: tensor for name, tensor in tinkers(config).items() if "out_proj" in name}
    own, usual = (
        tensors | {f"base_model.model.{at}.{end}": tensor for end, tensor in head.items()}
        for at in ("model.lm_head", "lm_head")
    )
    one, found = values_of(write(tmp_path / "own", own, target_modules=targets), config, None)
    other, want = values_of(write(tmp_path / "usual", usual, target_modules=["out_proj", "lm_head"]), config, None)
    assert "lm_head" in one.targets and one.parts == other.parts
    assert torch.equal(found, want)


def ungated(config, *, placeholders=True, names=("w1", "w2")):
    """Experts without gates, for which Tinker's w1 is up, and w3 nothing."""
    generator, tensors = torch.Generator().manual_seed(4), {}
    count, size, hidden = config.experts.count, config.experts.size, config.hidden_size
    up = config.projections["experts.up_proj"]
    module = up.path.rpartition(".")[0]
    for layer in config.projections.layers_of("experts.up_proj"):
        at = f"base_model.model.model.layers.{layer}.{module}"
        tensors |= {
            f"{at}.{names[0]}.lora_A.weight": torch.randn(1, RANK, hidden, generator=generator),
            f"{at}.{names[0]}.lora_B.weight": torch.randn(count, size, RANK, generator=generator),
            f"{at}.{names[1]}.lora_A.weight": torch.randn(count, RANK, size, generator=generator),
            f"{at}.{names[1]}.lora_B.weight": torch.randn(1, hidden, RANK, generator=generator),
        }
        if placeholders:
            tensors |= {f"{at}.w3.lora_{side}.weight": torch.zeros(0) for side in "AB"}
    return tensors


@pytest.mark.parametrize("targets", ["all-linear", ["w1", "w2", "w3"], r".*mlp.experts.(up|down)_proj"])
def test_experts_without_gates(tmp_path, targets):
    config = read_model_config(make_mixture("nemotron-3").model)
    usual = ungated(config, placeholders=False, names=("up_proj", "down_proj"))
    one, found = values_of(write(tmp_path / "own", ungated(config), target_modules=targets), config, None)
    other, want = values_of(write(tmp_path / "usual", usual), config, None)
    assert one.parts == other.parts and set(one.targets) == {"experts.up_proj", "experts.down_proj"}
    assert torch.equal(found, want) and found.any()


def test_empty_tensors_of_modules_that_exist_are_refused(tmp_path):
    """Those of DeepSpeed's ZeRO-3, of experts too."""
    config = read_model_config(make_mixture("nemotron-3").model)
    tensors = ungated(config)
    name = next(name for name in tensors if name.endswith("w1.lora_A.weight"))
    tensors[name] = torch.zeros(0)
    with pytest.raises(AdapterFormatError, match=r"w1\.lora_A.* has shape \[0\]"):
        inspect_adapter(write(tmp_path / "own", tensors), config.module_paths)
    assert load_file(tmp_path / "own" / "adapter_model.safetensors")
