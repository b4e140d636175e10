"""Rotary frequencies of a checkpoint, and their scaling, bit for bit as in transformers (modeling_rope_utils.py).

Tests: tests/core/model/specs/test_model_config.py, tests/core/model/specs/test_axes.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROPE_TYPES = ("default", "linear", "llama3", "dynamic", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary base and scaling; a scaling's fields are unused by the types that lack them."""

    dim: int
    """Leading elements of a head that are rotated: all of them, or fewer with a partial rotary factor."""

    theta: float = 10000.0

    type: str = "default"
    """One of ROPE_TYPES. `dynamic` is `default` within the positions that the model was trained for."""

    interleaved: bool = False
    """Rotate elements 2i and 2i + 1 together (GLM, Cohere), rather than i and i + dim / 2."""

    axes: tuple[int, ...] = ()
    """For each frequency, the axis whose position it turns by: 0 time, 1 height, 2 width (M-RoPE). Empty: positions
    have one axis. They differ at images alone."""

    backward: bool = False
    """Rotate the other way (nanochat)."""

    attention_factor: float = 1.0
    """Factor of cos and sin."""

    is_learned: bool = False
    """The model has logarithms of factors of the frequencies, one each (Mistral Large 4)."""

    factor: float = 1.0
    original_max_position_embeddings: int = 8192

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    pairs: int = 0
    """Of `proportional`: pairs of elements that turn; the others of `dim` stay (Gemma 4)."""

    short_factors: tuple[float, ...] = ()
    """Of `longrope`, for each frequency, where no request is longer than the original positions."""

    long_factors: tuple[float, ...] = ()
    """Likewise, where requests may be longer."""

    def inverse_frequencies(self, positions: int = 0) -> torch.Tensor:
        """Rotary frequencies `[dim / 2]` float32. positions: the most of a request.

        One set of factors serves all positions of all requests: keys of an earlier token would be stale if a request
        changed from one to the other where it outgrows the original positions.
        """
        import torch

        powers = self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        match self.type:
            case "linear":
                return 1.0 / powers / self.factor
            case "llama3":
                return self._llama3(1.0 / powers)
            case "yarn":
                return self._yarn(powers)
            case "proportional":
                turning, still = (1.0 / powers)[: self.pairs], torch.zeros(self.dim // 2 - self.pairs)
                return torch.cat((turning, still)) / self.factor
            case "longrope":
                is_long = positions > self.original_max_position_embeddings
                factors = self.long_factors if is_long else self.short_factors
                return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
            case _:
                return 1.0 / powers

    def angles(self, positions: int = 0) -> torch.Tensor:
        """By how much a position rotates each pair: `inverse_frequencies`, with their sign."""
        frequencies = self.inverse_frequencies(positions)
        return -frequencies if self.backward else frequencies

    @property
    def element_axes(self) -> list[int]:
        """`axes`, of each rotated element."""
        return [axis for axis in self.axes for _ in range(2)] if self.interleaved else [*self.axes, *self.axes]

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

    def _yarn(self, powers: torch.Tensor) -> torch.Tensor:
        """YaRN (arXiv 2309.00071): frequencies below `beta_slow` rotations are interpolated, those above `beta_fast`
        kept, and those between ramp from one to the other.
        """
        import torch

        def dimension(rotations: float) -> float:
            length = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return self.dim * math.log(length) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (torch.arange(self.dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
        kept = 1 - torch.clamp(ramp, 0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept


def rope_described(rope: RopeConfig | None) -> str:
    """How a rope rotates, for people."""
    return "not rotated" if rope is None else f"rotated by a {rope.type} rope of base {rope.theta:g}"
