"""Rotary frequencies of a checkpoint, and their scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary base and scaling; a scaling's fields are unused by the types that lack them.

    type: one of ROPE_TYPES. factor: linear and llama3. The others: llama3 only.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Rotary frequencies `[head_dim / 2]` float32, bit for bit as in transformers."""
        import torch

        frequencies = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.type == "linear":
            return frequencies / self.factor
        if self.type == "llama3":
            return self._llama3(frequencies)
        return frequencies

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Long wavelengths are stretched by `factor`, short ones kept, medium ones interpolated."""
        import torch

        low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        wavelength = 2 * math.pi / frequencies
        slow, fast = wavelength > length / low, wavelength < length / high
        scaled = torch.where(slow, frequencies / self.factor, frequencies)
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * scaled / self.factor + smooth * scaled
        return torch.where(slow | fast, scaled, between)
