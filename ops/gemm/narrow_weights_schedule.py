"""Schedule of the launch that widens narrow weights."""

from __future__ import annotations

from dataclasses import dataclass

from .small_gemm_schedule import WeightForm

WIDEN_WARPS = 4
"""Warps of a program that widens weights."""


@dataclass(frozen=True, slots=True)
class WidenConstants:
    """Compile-time constants of a launch that widens weights."""

    d_in: int
    bits: int
    group: int
    zeros: bool
    """Zero points are read; without, all are `2^(bits - 1)`."""
    float8: bool = False
    """Weights are FP8, without zero points."""
    rows: int = 16
    """Rows of a program."""
    inputs: int = 256

    @property
    def unit(self) -> int:
        """Bits that are loaded as one number; see `WeightForm.unit`."""
        return WeightForm(self.bits, float8=self.float8).unit
