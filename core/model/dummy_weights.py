"""Random weights made from a configuration alone, on the device: a model of true size without a checkpoint."""

from __future__ import annotations

import math

import torch

from .config import ModelConfig
from .weights import LM_HEAD, Weights

#: The output projection is this much larger than the others, so that greedy choices are clear ones.
_HEAD_GAIN = 4.0


class DummyWeights(Weights):
    """Seeded random weights: projections N(0, 1/in), biases N(0, 0.02²), norms in 0.75 … 1.25."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        super().__init__(config, dtype)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def _read(self, *names: str, reuse: bool = False) -> torch.Tensor:
        made = torch.empty(self._shape(names), dtype=self._dtype, device=self._device)
        if names[0].endswith("norm.weight"):
            return made.uniform_(0.75, 1.25, generator=self._generator)
        if names[0].endswith(".bias"):
            return made.normal_(0, 0.02, generator=self._generator)
        gain = _HEAD_GAIN if names[0] == LM_HEAD else 1.0
        return made.normal_(0, gain / math.sqrt(made.shape[1]), generator=self._generator)
