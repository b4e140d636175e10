"""Mamba 1 by heads (Zamba, arXiv 2405.16712 §2): the channels of a head have time steps, B and C of their own.

For every token, from its row of the input projection, in which columns of x and of the gate z alternate:

    x = silu(conv(x) + bias)                        causal, depthwise, over the last `conv_size` tokens
    dt, B, C = parts of W_h x_h                     of each head h
    dt = softplus(V_h dt + dt_bias)                 of each channel
    S ← exp(-rates · dt) · S + B ⊗ (dt · x)         rates = exp(A_log), of each channel and row of S
    out = (C S + D · x) · silu(z)

All of it is float32. A draft's inputs are those of the convolution. See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_recurrent.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..elementwise.activations import silu, softplus
from .recurrent import CHUNK, RecurrentState, RecurrentWeights, convolve, convolve_tokens, scanned
from .selective_scan import by_rows, write_rows

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


class _Terms(NamedTuple):
    """Of each token: how much of a state is kept, what is added to it, and C, `[tokens, state, channels]`."""

    kept: torch.Tensor
    added: torch.Tensor
    c: torch.Tensor


@dataclass(slots=True)
class HeadedScanWeights(RecurrentWeights):
    """A layer's mixer."""

    conv: torch.Tensor
    """`[conv_size, channels]`: each channel's factors of a token's inputs, of the oldest first."""

    bias: torch.Tensor | None
    """`[channels]`, of the convolution."""

    low: torch.Tensor
    """`[heads, rank + 2 · state, head_dim]`: what dt, B and C are made by."""

    steps: torch.Tensor
    """`[heads, head_dim, rank]`: what makes a head's time steps."""

    steps_bias: torch.Tensor
    """`[channels]`."""

    rates: torch.Tensor
    """`[state, channels]`."""

    d: torch.Tensor
    """`[channels]`."""

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """Chunk after chunk."""
        x = self._activated(convolve(self._inputs(rows), self.conv, state.conv))
        held, found = by_rows(state.recurrent)[0], []
        for own in x.split(CHUNK):
            kept, added, c = self._terms(own)
            left, seen = scanned(kept, added)
            states = seen + left * held
            held = states[-1]
            found.append((c * states).sum(1))
        write_rows(state.recurrent, held[None])
        return torch.cat(found) + self.d * x

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        x, held, c = self._updated(self._inputs(rows), state)
        return (c * held).sum(1) + self.d * x

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """Times its gates."""
        return mixed * silu(rows[:, 1::2].float())

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.draft_inputs`."""
        return self._inputs(rows)

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        self._updated(inputs, state)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """See `RecurrentWeights.native_tensors`."""
        own = {"taps": self.conv, "conv_bias": self.bias, "dt_bias": self.steps_bias, "rates": self.rates, "d": self.d}
        return {**own, "scan_low": self.low, "scan_steps": self.steps}

    def _inputs(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, ::2].float()

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x if self.bias is None else x + self.bias)

    def _terms(self, x: torch.Tensor) -> _Terms:
        heads, width = len(self.low), len(self.rates)
        low = torch.einsum("thd,hrd->thr", x.unflatten(1, (heads, -1)), self.low)
        latents, b, c = low.split((low.shape[2] - 2 * width, width, width), 2)
        dt = softplus(torch.einsum("thr,hdr->thd", latents, self.steps).flatten(1) + self.steps_bias)
        b, c = (each.transpose(1, 2).repeat_interleave(x.shape[1] // heads, 2) for each in (b, c))
        return _Terms((-self.rates * dt[:, None]).exp(), b * (dt * x)[:, None], c)

    def _updated(self, inputs: torch.Tensor, state: RecurrentState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, the states after one token of each sequence `[sequences, state, channels]`, and C."""
        x = self._activated(convolve_tokens(inputs, self.conv, state.conv))
        # one by one: products of several rows would round otherwise than those of one
        kept, added, c = (torch.cat(each) for each in zip(*map(self._terms, x.split(1)), strict=True))
        held = kept * by_rows(state.recurrent) + added
        write_rows(state.recurrent, held)
        return x, held, c
