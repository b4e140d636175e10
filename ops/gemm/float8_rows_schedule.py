"""Schedule of the launch that rounds rows of activations to FP8."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundConstants:
    """Compile-time constants of a launch that rounds rows, with one program per row."""

    width: int
    """Elements of a row."""
    dense: bool
    """The numbers that FP8 stands for are written, in x's dtype; else FP8 and the row's scale."""

    @property
    def block(self) -> int:
        """`width`, or the next power of two."""
        return 1 << (self.width - 1).bit_length()

    @property
    def warps(self) -> int:
        """Warps of a program: no thread holds more than 32 elements, up to 16 warps."""
        return min(16, max(1, self.block // 1024))
