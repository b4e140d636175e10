"""A projection's weight for PyTorch's operators whose inputs are rounded first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checkpoints.quantization.rounded_inputs import RoundedInputs


@dataclass(frozen=True, slots=True)
class RoundingWeight:
    """A dequantised weight, and how its inputs are rounded; adapters get them as they are."""

    weight: torch.Tensor
    """`[out, in]`, perhaps in oneDNN's layout."""

    inputs: RoundedInputs

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.weight.shape

    def __len__(self) -> int:
        return len(self.weight)
