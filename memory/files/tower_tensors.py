"""Tensors of an adapter that are in a vision tower or its projector, checked against the tower's modules.

They are LoRA on linear layers and patch convolutions, magnitudes of DoRA, biases, and modules that are copied whole.

Tests: tests/core/media/test_tower_adapters.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .config import CONFIG_FILE, AdapterConfig
from .error import AdapterFormatError, shown
from .names.module_names import ModuleNames
from .peft_names import PREFIX
from .tensor_file import TensorFile
from .tensor_info import TensorInfo
from .tower_shapes import TowerShapes

A, B, MAGNITUDE, LORA_BIAS = "a", "b", "magnitude", "bias"

_PARTS = {
    "lora_A.weight": A,
    "lora_B.weight": B,
    "lora_B.bias": LORA_BIAS,
    "lora_magnitude_vector": MAGNITUDE,
    "lora_magnitude_vector.weight": MAGNITUDE,
}
_PART = re.compile(rf"(.+)\.({'|'.join(map(re.escape, _PARTS))})")
_ADAPTER_NAME = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)\.(?!(?:weight|bias)$)[^.]+(?=\.weight$|\.bias$|$)")
_COPY = re.compile(r"\.modules_to_save(?:\.default)?\.")
_LORA = re.compile(r"\.lora_")


class TowerTensor(NamedTuple):
    """A tensor of an adapter's tower part."""

    name: str
    """Among the file's plain names."""
    module: str
    """The module that it changes, or the parameter that it is a copy of, without the `model.` around it."""
    part: str
    """One of the parts above; empty: it is a whole parameter."""
    scale: float = 1.0


@dataclass(slots=True)
class _Checked:
    """An adapter's tower tensors that are being checked."""

    file: TensorFile
    config: AdapterConfig
    shapes: TowerShapes

    def refuse(self, name: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self.file.path}: tensor {shown(self.file.given_name(name))} {why}")

    def tensors(self, found: Mapping[str, TensorInfo]) -> tuple[TowerTensor, ...]:
        lora: dict[str, dict[str, tuple[str, TensorInfo]]] = defaultdict(dict)
        given, copies = dict[str, str](), list[TowerTensor]()
        for name, info in found.items():
            plain = _ADAPTER_NAME.sub(r".\1", name.removeprefix(PREFIX))
            match = _PART.fullmatch(plain)
            if match is None:
                copies.append(self._copy(name, plain, info))
                continue
            module = self._own(match[1])
            if module not in self.shapes.linear:
                what = "is on a module that is no linear layer of the vision tower and no convolution of its patches"
                raise self.refuse(name, f"{what}; leave it out of target_modules, or name it in exclude_modules")
            lora[module][_PARTS[match[2]]] = name, info
            given[module] = match[1]
        return (*self._changes(lora, given), *copies)

    def _own(self, name: str) -> str:
        """A module's name without what is around the tower."""
        return self.shapes.current(name.removeprefix("model."))

    def _copy(self, name: str, plain: str, info: TensorInfo) -> TowerTensor:
        if _LORA.search(plain):
            raise self.refuse(
                name, "is LoRA on embeddings or another module of the vision tower that is not served; exclude it"
            )
        own = self._own(_COPY.sub(".", plain).replace(".base_layer.", "."))
        if (shape := self.shapes.parameters.get(own)) is None:
            raise self.refuse(name, "is unknown: the base model's vision tower has no such parameter")
        if info.shape != shape:
            raise self.refuse(name, f"has shape {list(info.shape)}, {list(shape)} is needed")
        return TowerTensor(name, own, "")

    def _changes(
        self, lora: Mapping[str, dict[str, tuple[str, TensorInfo]]], given: Mapping[str, str]
    ) -> list[TowerTensor]:
        """given: the modules' names in the file, which patterns of an older adapter match rather than today's."""
        matrices = self.shapes.matrices
        plain = (module for module in self.shapes.linear if module not in matrices)
        names = dict.fromkeys((*given.values(), *(f"model.{module}" for module in plain)))
        targets = {**self.config.targets(ModuleNames([*names])), **self._matrices(lora, given)}
        found = []
        for module, parts in lora.items():
            first = next(iter(parts.values()))[0]
            rank_and_scale = targets.get(given[module]) or targets.get(f"model.{module}")
            if rank_and_scale is None:
                raise self.refuse(first, f"is not targeted by {CONFIG_FILE} (target_modules, exclude_modules)")
            if not {A, B} <= parts.keys():
                raise self.refuse(first, "has no other side: A and B are needed; save the adapter again")
            self._check_shapes(parts, self.shapes.linear[module], rank_and_scale[0])
            found += [TowerTensor(name, module, part, rank_and_scale[1]) for part, (name, _) in parts.items()]
        return found

    def _matrices(
        self, lora: Mapping[str, dict[str, tuple[str, TensorInfo]]], given: Mapping[str, str]
    ) -> dict[str, tuple[int, float]]:
        """Rank and scale of matrices that are targeted as parameters, by their modules' names in the file."""
        own = {module: name for module, name in self.shapes.matrices.items() if module in lora}
        targets = self.config.parameter_targets(ModuleNames([f"model.{name}" for name in own.values()]))
        return {given[module]: targets[f"model.{name}"] for module, name in own.items() if f"model.{name}" in targets}

    def _check_shapes(self, parts: Mapping[str, tuple[str, TensorInfo]], weight: tuple[int, ...], rank: int) -> None:
        if len(weight) > 2 and MAGNITUDE in parts:
            raise self.refuse(parts[MAGNITUDE][0], "is DoRA on a convolution, which is not served; use plain LoRA")
        for part, wanted in _shapes(weight, rank).items():
            if part in parts and parts[part][1].shape != wanted:
                name, info = parts[part]
                raise self.refuse(name, f"has shape {list(info.shape)}, {list(wanted)} is needed")


def tower_tensors(
    file: TensorFile, found: Mapping[str, TensorInfo], config: AdapterConfig, shapes: TowerShapes | None
) -> tuple[TowerTensor, ...]:
    """The tower part of an adapter. found: its tensors there, by plain name. shapes: None: none is served.

    Raises AdapterFormatError for what would not be served as PEFT applies it.
    """
    if shapes is None:
        return ()
    if found and config.invocation_tokens:
        raise config.refuse(
            "alora_invocation_tokens",
            "the adapter changes the vision tower, whose images come before these tokens; train on text modules alone",
        )
    return _Checked(file, config, shapes).tensors(found)


def _shapes(weight: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of an adapter's parts on a weight."""
    outputs, inputs = weight[0], weight[1:]
    ones = (1,) * (len(inputs) - 1)
    return {A: (rank, *inputs), B: (outputs, rank, *ones), MAGNITUDE: (outputs,), LORA_BIAS: (outputs,)}
