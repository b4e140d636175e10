"""Random weights as small whole numbers with scales, packed and in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorus.ops.library.native_integers import BLOCK, IntegerPanels, pack_integers


@dataclass
class WholeNumbers:
    """`(integers - zeros) · scales`, with a scale and perhaps a zero point for each row and `group` inputs."""

    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    input_bits: int = 16
    input_block: int = BLOCK

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int, group: int, zeros: bool = False) -> WholeNumbers:
        """Weights near a matrix, with random zero points where `zeros`."""
        rows, inputs = weight.shape
        half, groups, width = 1 << (bits - 1), -(-inputs // group), min(group, inputs)
        padded = torch.zeros(rows, groups * width)
        padded[:, :inputs] = weight
        padded = padded.view(rows, groups, width)
        scales = padded.abs().amax(-1).clamp_min(1e-6) / (half - 0.5)
        shift = torch.zeros_like(scales)
        if zeros:
            generator = torch.Generator().manual_seed(rows)
            shift = torch.randint(-half // 2, half // 2, scales.shape, generator=generator).float()
        whole = (padded / scales[..., None] + shift[..., None]).round().clamp(-half, half - 1)
        integers = whole.view(rows, -1)[:, :inputs].to(torch.int8)
        return cls(integers, scales, shift.to(torch.int16) if zeros else None, bits, group)

    @property
    def weight(self) -> torch.Tensor:
        """In float64."""
        spread = torch.arange(self.integers.shape[1]) // self.group
        zeros = 0 if self.zeros is None else self.zeros.double()[:, spread]
        return (self.integers.double() - zeros) * self.scales.double()[:, spread]

    def packed(self) -> IntegerPanels:
        return pack_integers(
            self.integers, self.scales, self.zeros, bits=self.bits, group=self.group,
            input_bits=self.input_bits, input_block=self.input_block,
        )  # fmt: skip
