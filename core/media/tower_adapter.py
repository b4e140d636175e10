"""What an adapter changes in a vision tower: read from its files, and checked against the tower's modules.

Tests: tests/core/media/test_tower_adapters.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...memory.files.adapter_weights import AdapterWeights
from ...memory.files.error import AdapterFormatError, shown
from ...memory.files.identity import open_unchanged
from ...memory.files.peft_names import PREFIX
from ...memory.files.tower_tensors import LORA_BIAS, MAGNITUDE, A, B
from ...memory.files.values import read_values
from ..model.specs.vision import VisionSpec
from .linear import Change, TowerChanges

if TYPE_CHECKING:
    from ...memory.files.manifest import AdapterManifest


def read_changes(manifest: AdapterManifest) -> TowerChanges | None:
    """Read an adapter's tower part; None if it has none. Raises AdapterFormatError."""
    if not manifest.tower:
        return None
    changes, parts, scales = TowerChanges(), defaultdict[str, dict[str, torch.Tensor]](dict), dict[str, float]()
    with open_unchanged(manifest) as file:
        assert isinstance(file, AdapterWeights), "an adapter that is composed of others has no part in a tower"
        _ = file.tensors
        for each in manifest.tower:
            info = file.tower.get(each.name)
            if info is None:
                raise file.changed()
            values = read_values(file, info).clone()
            if each.part:
                parts[each.module][each.part], scales[each.module] = values, each.scale
            else:
                changes.copies[each.module] = values
    for module, own in parts.items():
        changes.modules[module] = Change(own[A], own[B], scales[module], own.get(MAGNITUDE), own.get(LORA_BIAS))
    return changes


def check_changes(manifest: AdapterManifest) -> None:
    """Raise AdapterFormatError if a value of an adapter's tower part is not a finite number."""
    with open_unchanged(manifest) as file:
        assert isinstance(file, AdapterWeights), "an adapter that is composed of others has no part in a tower"
        _ = file.tensors
        for each in manifest.tower:
            if not bool(read_values(file, file.tower[each.name]).isfinite().all()):
                at = f"{file.path}: tensor {shown(file.given_name(each.name))} holds"
                raise AdapterFormatError(f"{at} NaN or infinity; the training diverged or the file is corrupt")


@dataclass(frozen=True)
class CheckpointTower:
    """The shapes of a checkpoint's tower, read when they are first asked for: see `TowerShapes`."""

    directory: Path
    architecture: str
    spec: VisionSpec

    @cached_property
    def _modules(self) -> torch.nn.Module:
        from .tower import skeleton

        return skeleton(self.directory, self.architecture, self.spec)

    @cached_property
    def linear(self) -> Mapping[str, tuple[int, ...]]:
        from .linear import is_patches

        found = {
            name: tuple(each.weight.shape)
            for name, each in self._modules.named_modules()
            if type(each) is torch.nn.Linear or is_patches(each)
            if isinstance(each.weight, torch.Tensor)
        }
        return found | {name: self.parameters[parameter] for name, parameter in self.matrices.items()}

    @property
    def matrices(self) -> Mapping[str, str]:
        return {each.rpartition(".")[0]: each for each in self.spec.matrices}

    @cached_property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self._modules.named_parameters()}

    @property
    def copied(self) -> tuple[str, ...]:
        return (*self.spec.modules, *self.spec.copied)

    def has(self, name: str) -> bool:
        begins = (*self.spec.modules, *(before for before, _ in self.spec.renamed))
        own = name.removeprefix(PREFIX).removeprefix("model.")
        if not own.startswith(tuple(f"{each}." for each in begins)):
            return False
        return not self.current(own).startswith(tuple(f"{each}." for each in self.spec.unused))

    def current(self, name: str) -> str:
        for before, now in self.spec.renamed:
            if name.startswith(f"{before}."):
                return now + name.removeprefix(before)
        return name
