"""Activations that are rounded to 8 bits before a product, as in the schemes W8A8, W4A8 and FP8.

Tests: tests/core/model/checkpoints/quantization/test_rounded_inputs.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 64
"""Inputs of a block, unless a checkpoint says otherwise."""

MULTIPLE = 8
"""A block's inputs must be a multiple of it."""

LARGEST = 1 << 16
"""Inputs of the largest block: the sum of its products with weights of 8 bits has 31 bits."""

_MOST = 127
_LEAST = 1e-28  # of a block's largest value; below it, all become 0


@dataclass(frozen=True, slots=True)
class Float8Inputs:
    """Activations in FP8, each row by itself, which the form of weights asks for: see ops/gemm/float8_rows.py. GPUs
    obey it if `fp8_activations` is set.
    """


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """Each row is rounded by itself, in blocks of consecutive inputs: the largest of a block becomes 127 or -127, the
    others the nearest whole number, ties to even. As `fix_block` of ops/native/gemm/fixed_rows.h.
    """

    block: int = BLOCK
    """Inputs of a block; the last one of a row may be shorter."""

    def within(self, group: int, inputs: int) -> RoundedInputs:
        """The same in blocks that are each within one of the weights' groups. group: its inputs; inputs: of a row."""
        return self if group >= inputs else replace(self, block=math.gcd(group, self.block))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[rows, in]` rounded, in its dtype. A block with a value that is not finite becomes NaN."""
        import torch

        rows, inputs = x.shape
        blocks = -(-inputs // self.block)
        padded = torch.zeros(rows, blocks * self.block, device=x.device)
        padded[:, :inputs] = x
        padded = padded.view(rows, blocks, self.block)
        most = padded.abs().amax(-1, keepdim=True)
        inverse = torch.where(most <= _LEAST, 0.0, _MOST / most)  # NaN stays
        whole = padded.mul_(inverse).round_().mul_(most / _MOST)
        return whole.view(rows, -1)[:, :inputs].to(x.dtype)
