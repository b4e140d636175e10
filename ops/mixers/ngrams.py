"""Rows of a table for the last few tokens, and the convolution of what streams take of them (Qwen4-Exp).

The first part gives each token the numbers of its rows. For n = 2 … size, of the token and the n - 1 before it:

    hash = t₀ · m₀ ⊕ t₁ · m₁ ⊕ …            of 64 bits; tokens before the last end of a text are that end
    rows = hash mod vocab_h + first_h       of some heads h each

The second part is causal, depthwise, and sees every `size`-th token:

    out = silu(Σ taps_k · x[t - k · size])  in float32

The state of the first part is the last tokens, less the one that ends a text: zeros are the beginning of one. Its
inputs are whole numbers. See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_ngrams.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..elementwise.activations import silu
from .recurrent import RecurrentState, RecurrentWeights, StatePart

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

#: How far apart the seeds of layers are.
_LAYER_STEP = 10007


def multipliers(vocab: int, size: int, place: int, seed: int) -> list[int]:
    """Odd factors of the last `size` tokens, whose products are below 2⁶³. place: a layer's among those with tables."""
    half = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
    first = seed + _LAYER_STEP * place
    return [2 * (_mixed((first + _GAMMA * (index + 1)) & _MASK) % half) + 1 for index in range(size)]


def _mixed(value: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FACTORS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _FACTORS[1]) & _MASK
    return (value ^ (value >> 31)) & _MASK


@dataclass(slots=True)
class NgramNumbers(RecurrentWeights):
    """The first part: which rows a token has."""

    further: ClassVar[bool] = True

    factors: torch.Tensor
    """`[size]` int64, of a token and of those before it."""

    sizes: torch.Tensor
    """`[heads]` int64: rows of each head's part of the table."""

    firsts: torch.Tensor
    """`[heads]` int64: the first row of each."""

    end: int
    """The token that ends a text."""

    channels: int
    """Of the second part, before whose inputs those of a draft stand."""

    @property
    def part(self) -> StatePart:
        """See `RecurrentWeights.part`."""
        return StatePart(has_conv=False, has_heads=True, drafts=slice(self.channels, self.channels + 1))

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """rows: tokens `[tokens, 1]` int64. Returns `[tokens, heads]` int64."""
        before = len(self.factors) - 1
        known = torch.cat((state.recurrent[0, 0].long() + self.end, rows[:, 0]))
        state.recurrent[0, 0] = (known[len(known) - before :] - self.end).float()
        return self._numbers(known.unfold(0, before + 1, 1))

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `prompt`."""
        known = torch.cat((state.recurrent[:, 0].long() + self.end, rows), 1)
        state.recurrent[:, 0] = (known[:, 1:] - self.end).float()
        return self._numbers(known)

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """The numbers as they are."""
        return mixed

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """The tokens, as the state has them."""
        return (rows - self.end).float()

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        state.recurrent[:, 0] = torch.cat((state.recurrent[:, 0, 1:], inputs), 1)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """None: the native library does not compute it."""
        return {}

    def _numbers(self, known: torch.Tensor) -> torch.Tensor:
        """known: the last tokens of each `[tokens, size]`, oldest first."""
        size = known.shape[1]
        per = len(self.sizes) // (size - 1)
        token, has_ended, found = known[:, -1], torch.zeros_like(known[:, 0], dtype=torch.bool), []
        hashed = token * self.factors[0]
        for back in range(1, size):
            token = known[:, -1 - back]
            has_ended = has_ended | (token == self.end)
            hashed = hashed ^ (torch.where(has_ended, self.end, token) * self.factors[back])
            heads = slice((back - 1) * per, back * per)
            found.append(torch.remainder(hashed[:, None], self.sizes[heads]) + self.firsts[heads])
        return torch.cat(found, 1)


@dataclass(slots=True)
class NgramWeights(RecurrentWeights):
    """The second part: a convolution of tokens that are some apart."""

    further: ClassVar[bool] = True

    first: NgramNumbers

    taps: torch.Tensor
    """`[size, channels]`: each channel's factors, of the oldest token first."""

    every: int
    """How many tokens apart the inputs of two taps are."""

    @property
    def part(self) -> StatePart:
        """See `RecurrentWeights.part`."""
        return StatePart(has_conv=True, has_heads=False, drafts=slice(0, self.taps.shape[1]))

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.prompt`."""
        seen = torch.cat((state.conv[0], rows.float()))
        state.conv[0] = seen[len(rows) :]
        return self._weighted([seen[at : at + len(rows)] for at in self._places])

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        seen = self._taken_in(rows.float(), state)
        return self._weighted([seen[:, at] for at in self._places])

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """Through the activation."""
        return silu(mixed)

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """The rows themselves."""
        return rows.float()

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        self._taken_in(inputs, state)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """None: the native library does not compute it."""
        return {}

    @property
    def _places(self) -> range:
        """Of the inputs that each tap takes, among those of a token and of the ones before it."""
        return range(0, len(self.taps) * self.every, self.every)

    @staticmethod
    def _taken_in(inputs: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        seen = torch.cat((state.conv, inputs[:, None]), 1)
        state.conv.copy_(seen[:, 1:])
        return seen

    def _weighted(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        total = inputs[0] * self.taps[0]
        for x, factors in zip(inputs[1:], self.taps[1:], strict=True):
            total = total + x * factors
        return total
