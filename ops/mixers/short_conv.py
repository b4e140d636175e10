"""A gated short convolution (LFM2), between a layer's two projections.

For every token, from its row `[b, c, x]` of the input projection:

    out = c · (conv(b · x) + bias)          causal, depthwise, over the last `conv_size` tokens

All of it is float32. A draft's inputs are `b · x`. See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_recurrent.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .recurrent import RecurrentState, RecurrentWeights, convolve, convolve_tokens

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@dataclass(slots=True)
class ShortConvWeights(RecurrentWeights):
    """A layer's convolution."""

    conv: torch.Tensor
    """`[conv_size, channels]`: each channel's factors of a token's inputs, of the oldest first."""

    bias: torch.Tensor | None
    """`[channels]`."""

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.prompt`."""
        return self._biased(convolve(_gated(rows), self.conv, state.conv))

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        return self._biased(convolve_tokens(_gated(rows), self.conv, state.conv))

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """The convolution's output times c."""
        return mixed * rows.chunk(3, 1)[1].float()

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """`b · x`."""
        return _gated(rows)

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        convolve_tokens(inputs, self.conv, state.conv)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """See `RecurrentWeights.native_tensors`."""
        return {"taps": self.conv, "conv_bias": self.bias}

    def _biased(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bias is None else x + self.bias


def _gated(rows: torch.Tensor) -> torch.Tensor:
    b, _, x = rows.float().chunk(3, 1)
    return b * x
