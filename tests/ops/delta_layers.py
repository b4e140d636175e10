"""Random layers of Gated DeltaNet for tests of its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chorus.ops.gated_delta import DeltaState, DeltaWeights


class DeltaLayer:
    """Random weights, states and rows."""

    def __init__(self, k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.channels = 2 * k_heads * k_dim + v_heads * v_dim
        self.width = self.channels + v_heads * v_dim + 2 * v_heads
        self.shapes = (conv_size - 1, self.channels), (v_heads, k_dim, v_dim)
        """Of a sequence's state: what the convolution keeps, and the recurrent state."""
        self.weights = DeltaWeights(
            self.normal(conv_size, self.channels),
            self.normal(v_heads),
            self.normal(v_heads),
            1 + 0.2 * self.normal(v_dim),
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)

    def state(self, sequences: int) -> DeltaState:
        return DeltaState(*(self.normal(sequences, *shape) for shape in self.shapes))

    def rows(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        return [self.normal(length, self.width) for length in lengths]


def copy(state: DeltaState) -> DeltaState:
    return DeltaState(state.conv.clone(), state.recurrent.clone())
