"""Mamba 1 (arXiv 2312.00752) in two parts, between which a layer has projections of its own.

For every token, from its row `[x | z]` of the input projection:

    x = silu(conv(x) + bias)                causal, depthwise, over the last `conv_size` tokens: the first part
    dt, B, C = projections of x             see `compose.mixers`
    dt = softplus(dt)                       of each channel
    S ← exp(-rates · dt) · S + B ⊗ (dt · x)     rates = exp(A_log), of each channel and row of S
    out = (C S + D · x) · silu(z)

All of it is float32. A draft's inputs are `[x]` of the convolution, then `[x, dt, B]` of the recurrence. Each part has
its share of a state, and of a draft's inputs. See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_selective_scan.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch

from ..elementwise.activations import silu, softplus
from .recurrent import CHUNK, RecurrentState, RecurrentWeights, StatePart, convolve, convolve_tokens, scanned

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@dataclass(slots=True)
class ScanInputs(RecurrentWeights):
    """The first part: the convolution. Rows are `[x | …]`."""

    conv: torch.Tensor
    """`[conv_size, channels]`: each channel's factors of a token's inputs, of the oldest first."""

    bias: torch.Tensor | None
    """`[channels]`, of the convolution."""

    @property
    def part(self) -> StatePart:
        """See `RecurrentWeights.part`."""
        return StatePart(has_conv=True, has_heads=False, drafts=slice(0, self.conv.shape[1]))

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.prompt`."""
        return self._activated(convolve(self._inputs(rows), self.conv, state.conv))

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        return self._activated(convolve_tokens(self._inputs(rows), self.conv, state.conv))

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """As they are."""
        return mixed

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.draft_inputs`."""
        return self._inputs(rows)

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        convolve_tokens(inputs, self.conv, state.conv)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """See `RecurrentWeights.native_tensors`."""
        return {"taps": self.conv, "conv_bias": self.bias}

    def _inputs(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, : self.conv.shape[1]].float()

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x if self.bias is None else x + self.bias)


@dataclass(slots=True)
class SelectiveScanWeights(RecurrentWeights):
    """The second part: the recurrence. Rows are `[x, dt, B, C, z]`, dt before softplus."""

    first: ScanInputs

    rates: torch.Tensor
    """`[state, channels]`."""

    d: torch.Tensor
    """`[channels]`."""

    @property
    def part(self) -> StatePart:
        """See `RecurrentWeights.part`."""
        width, channels = self.rates.shape
        return StatePart(has_conv=False, has_heads=True, drafts=slice(channels, 3 * channels + width))

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """Chunk after chunk."""
        x, dt, b, c = self._parts(rows[:, : self._inner].float())
        held, found = by_rows(state.recurrent)[0], []
        for first in range(0, len(rows), CHUNK):
            own = slice(first, first + CHUNK)
            left, seen = scanned(*self._terms(x[own], dt[own], b[own]))
            states = seen + left * held
            held = states[-1]
            found.append((c[own][:, :, None] * states).sum(1))
        write_rows(state.recurrent, held[None])
        return torch.cat(found) + self.d * x

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        x, dt, b, c = self._parts(rows[:, : self._inner].float())
        held = self._updated(x, dt, b, state)
        return (c[:, :, None] * held).sum(1) + self.d * x

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """Times its gates."""
        return mixed * silu(rows[:, self._inner :].float())

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """`[x, dt, B]`."""
        return rows[:, : self._inner - len(self.rates)].float()

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        channels = len(self.d)
        x, dt, b = inputs.split((channels, channels, len(self.rates)), 1)
        self._updated(x, dt, b, state)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """See `RecurrentWeights.native_tensors`."""
        return {**self.first.native_tensors, "rates": self.rates, "d": self.d}

    def to(self, device: torch.device) -> Self:
        """See `RecurrentWeights.to`."""
        return replace(self, first=self.first.to(device), rates=self.rates.to(device), d=self.d.to(device))

    @property
    def _inner(self) -> int:
        """Columns before z."""
        return 2 * len(self.d) + 2 * len(self.rates)

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        channels, width = len(self.d), len(self.rates)
        return rows.split((channels, channels, width, width), 1)

    def _terms(self, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How much of a state is kept, and what is added to it, `[tokens, state, channels]`."""
        dt = softplus(dt)
        return (-self.rates * dt[:, None]).exp(), b[:, :, None] * (dt * x)[:, None]

    def _updated(self, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """The states after one token of each sequence, `[sequences, state, channels]`."""
        kept, added = self._terms(x, dt, b)
        held = kept * by_rows(state.recurrent) + added
        write_rows(state.recurrent, held)
        return held


def by_rows(states: torch.Tensor) -> torch.Tensor:
    """States `[sequences, heads, state, head_dim]` as `[sequences, state, channels]`."""
    return states.transpose(1, 2).flatten(2)


def write_rows(states: torch.Tensor, rows: torch.Tensor) -> None:
    """Write what `by_rows` reads."""
    states.copy_(rows.unflatten(2, (states.shape[1], states.shape[3])).transpose(1, 2))
