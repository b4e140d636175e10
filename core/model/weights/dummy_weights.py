"""Random weights made from a configuration alone, on the device: a model of true size without a checkpoint."""

from __future__ import annotations

import math

import torch

from ..specs.config import ModelConfig
from .shard import WHOLE, Shard
from .slot import Slot
from .tensor_parts import LM_HEAD
from .weights import Weights

#: The output projection is this much larger than the others, so that greedy choices are clear ones.
_HEAD_GAIN = 4.0


class DummyWeights(Weights):
    """Seeded random weights: projections N(0, 1/in), biases N(0, 0.02²), norms and factors in 0.75 … 1.25, rates of
    decay in 0.01 … 16.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(config, dtype, shard)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def _read(
        self, *names: str, reuse: bool = False, dtype: torch.dtype | None = None, whole: bool = False
    ) -> torch.Tensor:
        """Every rank makes the whole tensors, of which it keeps its share."""
        shapes = [self._tensors[name].shape for name in names]
        shape = torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:]))
        made = self._make(names[0], shape, dtype or self._dtype)
        if self._shard.size == 1 or whole:
            return made
        parts = zip(names, made.split([shape[0] for shape in shapes]), strict=True)
        return torch.cat([part[own or ...] for name, part in parts for own in self._parts(name)])

    def _left_out(self, at: str, slot: Slot) -> None:
        for tensors in slot.items:  # the next numbers are the same on all ranks
            self._read(*(at + each.path for each in tensors))

    def _make(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=self._device)
        if name.endswith(("norm.weight", "scale", "scalar")):
            return made.uniform_(0.75, 1.25, generator=self._generator)
        if name.endswith("A_log"):
            return made.uniform_(0.01, 16, generator=self._generator).log_()
        if name.endswith("bias"):
            return made.normal_(0, 0.02, generator=self._generator)
        gain = _HEAD_GAIN if name == LM_HEAD else 1.0
        return made.normal_(0, gain / math.sqrt(made[0].numel()), generator=self._generator)
