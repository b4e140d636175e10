"""Real-gated linear recurrent units (RG-LRU, arXiv 2402.19427), between a layer's two projections.

For every token, from its row `[y | x]` of the input projections:

    x = conv(x) + bias                                  causal, depthwise, over the last `conv_size` tokens
    a = exp(-rate · σ(x W_r + b_r))                     W_r and W_i of each head; rate = 8 · softplus(Λ)
    h ← a · h + √(1 - a²) · σ(x W_i + b_i) · x          of a sequence's first token without the root
    out = h · gelu(y)                                   by tanh

All of it is float32. A draft's inputs are x. See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_recurrent.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import gelu

from .recurrent import RecurrentState, RecurrentWeights, convolve, convolve_tokens, scanned

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@dataclass(slots=True)
class RgLruWeights(RecurrentWeights):
    """A layer's units."""

    conv: torch.Tensor
    """`[conv_size, channels]`: each channel's factors of a token's inputs, of the oldest first."""

    bias: torch.Tensor
    """`[channels]`, of the convolution."""

    gates: torch.Tensor
    """`[2, heads, head_dim, head_dim]`: what makes gates of inputs, and of decays."""

    gate_bias: torch.Tensor
    """`[2, heads, head_dim]`."""

    rates: torch.Tensor
    """`[channels]`: the largest rate at which a unit forgets, for each token."""

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.prompt`."""
        x = convolve(rows[:, len(self.bias) :].float(), self.conv, state.conv) + self.bias
        assert state.fresh is not None
        begins = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        begins[:1] = state.fresh
        decay, added = scanned(*self._gated(x, begins))
        found = added + decay * state.recurrent[0].flatten()
        state.recurrent[0] = found[-1].view_as(state.recurrent[0])
        self._has_begun(state)
        return found

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        return self._tokens(rows[:, len(self.bias) :].float(), state)

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """The units times their gates."""
        return mixed * gelu(rows[:, : len(self.bias)].float(), approximate="tanh")

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """The convolution's inputs."""
        return rows[:, len(self.bias) :].float()

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        self._tokens(inputs, state)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """See `RecurrentWeights.native_tensors`."""
        own = {"gates": self.gates, "gate_bias": self.gate_bias, "rates": self.rates}
        return {"taps": self.conv, "conv_bias": self.bias, **own}

    def _tokens(self, x: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        assert state.fresh is not None
        x = convolve_tokens(x, self.conv, state.conv) + self.bias
        decay, added = self._gated(x, state.fresh)
        found = added + decay * state.recurrent.flatten(1)
        state.recurrent.copy_(found.view_as(state.recurrent))
        self._has_begun(state)
        return found

    def _gated(self, x: torch.Tensor, begins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of convolved inputs `[tokens, channels]`: how much of a unit is kept, and what is added to it. begins:
        `[tokens]` of booleans, a sequence's first token.
        """
        by_head = x.unflatten(1, self.gates.shape[1:3]).transpose(0, 1)
        enters, forgets = (
            torch.baddbmm(bias[:, None], by_head, weight).transpose(0, 1).flatten(1).sigmoid()
            for weight, bias in zip(self.gates, self.gate_bias, strict=True)
        )
        log_decay = -self.rates * forgets
        root = (1 - (2 * log_decay).exp()).sqrt().masked_fill(begins[:, None], 1.0)
        return log_decay.exp(), x * enters * root

    @staticmethod
    def _has_begun(state: RecurrentState) -> None:
        assert state.fresh is not None
        state.fresh.fill_(False)
