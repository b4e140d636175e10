"""Tiny models with a mixture of experts, with adapters on its parts, and reference answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..kept import KeptAnswers, kept_files
from .tiny_families import NO_OUT_PROJ, Tiny, load_model, load_peft, save_family, without_conversion

ATTENTION = ["q_proj", "o_proj", "in_proj_z", "in_proj", "out_proj"]
SHARED = ["gate_proj", "up_proj", "down_proj", "shared_expert_gate", "input_linear", "output_linear"]

#: name → fields of `LoraConfig`; target_modules are ends of names, of which a model has some
ADAPTERS: dict[str, dict[str, Any]] = {
    "r4-router": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": [*ATTENTION, "router.proj", "router.gate"],
        "target_parameters": ["gate.weight", "router.weight"],
    },
    "r2-experts": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"],
        "rank_pattern": {r".*experts\.gate_up_proj": 3},
        "alpha_pattern": {r"model\.layers\.1\..*": 9},
    },
    "r6-down": {"r": 6, "lora_alpha": 6, "target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
    "r5-shared": {"r": 5, "lora_alpha": 10, "target_modules": [*ATTENTION, *SHARED]},
}


@dataclass(eq=False)
class Mixture(Tiny):
    """As `Tiny`, with a reference for each adapter: PEFT loads several on parameters only if they have the same."""

    references: dict[str, Any] = field(default_factory=dict)

    def use(self, adapter: str | None) -> Any:
        name = adapter or next(iter(self.adapters))
        if name not in self.references:
            self.references[name] = self.watched(self.load(self.model, {"default": self.adapters[name]}))
        self.reference = self.references[name]
        return super().use(adapter and "default")


def make_mixture(name: str, recipes: Mapping[str, Mapping[str, Any]] = ADAPTERS) -> Mixture:
    """A family's model with adapters. recipes: see `ADAPTERS`."""
    root = kept_files(" ".join(["mixture", name, *recipes]), lambda root: _save_mixture(name, root, recipes))
    return Mixture(root / "model", {adapter: root / adapter for adapter in recipes}, load_peft, KeptAnswers(root))


@without_conversion()
def _save_mixture(name: str, root: Path, recipes: Mapping[str, Mapping[str, Any]]) -> None:
    save_family(name, root / "model")
    base = load_model(root / "model", dtype=torch.float32)
    for seed, (adapter, recipe) in enumerate(recipes.items()):
        fields = dict(recipe)
        if name.startswith(NO_OUT_PROJ):
            fields["target_modules"] = [each for each in recipe["target_modules"] if each != "out_proj"]
        _save_trained(deepcopy(base), root / adapter, fields, seed)


def _save_trained(model: Any, path: Path, recipe: Mapping[str, Any], seed: int) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    fields = dict(recipe)
    names = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    fields["target_modules"] = [each for each in fields["target_modules"] if any(n.endswith(f".{each}") for n in names)]
    parameters = [name for name, _ in model.named_parameters() if name.removesuffix(".weight") not in names]
    wanted = fields.pop("target_parameters", [])
    if found := [each for each in wanted if any(name.endswith(f".{each}") for name in parameters)]:
        fields["target_parameters"] = found
    trained = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **fields))
    trained.save_pretrained(path)


def unswapped(tensors: dict[str, torch.Tensor], name: str, count: int) -> torch.Tensor:
    """A or B of all experts, from the other one of them."""
    if name.endswith("lora_A.weight"):
        other = tensors[name.replace("lora_A", "lora_B")]
        return torch.cat([other[:, expert::count].T for expert in range(count)])
    other = tensors[name.replace("lora_B", "lora_A")]
    return torch.stack([rows.T for rows in other.chunk(count)], dim=2).flatten(1)


def one_by_one(
    source: Path,
    path: Path,
    count: int,
    names: dict[str, str] | None = None,
    alternate: bool = False,
    swapped: bool = False,
) -> Path:
    """Write an adapter on stacked experts as one on each of `count` experts. names: of an expert's matrices, if they
    are not Llama's, and of the module around them as `mlp`. alternate: rows of gate and up do, in stacked experts.
    swapped: A and B of stacked experts are, as of Llama 4.
    """
    names = names or {}
    tensors, given = {}, load_file(source / "adapter_model.safetensors")
    if swapped:
        given = {
            name: tensor if ".experts." not in name else unswapped(given, name, count) for name, tensor in given.items()
        }
    for name, tensor in given.items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        begin, end = re.split(r"\w+\.experts\.", name)
        at = f"{begin}{names.get('mlp', 'mlp')}.experts"
        is_gate_up = ".base_layer." in name
        kind = end.removeprefix("base_layer.")
        matrices = ["gate_proj", "up_proj"] if is_gate_up else ["down_proj"]
        for expert in range(count):
            if kind == "lora_A.weight":
                rows = tensor.view(count, -1, tensor.shape[1])[expert]
                parts = [rows] * len(matrices)
            else:
                own = tensor.view(len(tensor), -1, count)[:, :, expert]
                parts = own.chunk(len(matrices))
                if alternate and is_gate_up:
                    parts = own[::2], own[1::2]
            for matrix, part in zip(matrices, parts, strict=True):
                tensors[f"{at}.{expert}.{names.get(matrix, matrix)}.{kind}"] = part.clone()
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    del config["target_parameters"]
    each = {name: names.get(name, name) for name in ("gate_proj", "up_proj", "down_proj")}
    config["target_modules"] = rf".*(self_attn\.(indexer\.)?q_proj|experts\.[0-9]+\.({'|'.join(each.values())}))"
    config["rank_pattern"] = {rf".*experts\.[0-9]+\.({each['gate_proj']}|{each['up_proj']})": 3}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


LETTERS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def together(source: Path, path: Path, names: dict[str, str], attention: str = "self_attn") -> Path:
    """Write an adapter of `one_by_one` with a tensor for all experts' A, and one for B, as Tinker does. What all have
    alike is there once. names: of the matrices, and of the module around them as `mlp`. attention: that module's name.
    """
    sides: dict[str, dict[int, torch.Tensor]] = {}
    tensors = {}
    for name, tensor in load_file(source / "adapter_model.safetensors").items():
        match = re.fullmatch(r"(.+)\.\w+\.experts\.(\d+)\.(\w+)\.(.+)", name)
        if match is None:
            tensors[name.replace("self_attn", attention)] = tensor
            continue
        begin, expert, matrix, kind = match.groups()
        at = f"{begin}.{names.get('mlp', 'mlp')}.experts.{names[matrix]}.{kind}"
        sides.setdefault(at, {})[int(expert)] = tensor
    for name, numbered in sides.items():
        parts = [numbered[expert] for expert in range(len(numbered))]
        tensors[name] = torch.stack(parts[:1] if all(torch.equal(part, parts[0]) for part in parts) else parts)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    config["target_modules"] = rf".*(attn\.(indexer\.)?q_proj|experts\.({'|'.join(map(names.get, LETTERS))}))"
    config["rank_pattern"] = {rf".*experts\.({names['gate_proj']}|{names['up_proj']})": 3}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
