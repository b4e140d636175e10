"""Two convolutions of queries and keys, and values half of which are delayed (ZAYA, arXiv 2510.04476), between the
input product of a layer and its attention.

For every token, from its row `[q, k, v | w]` of the input product:

    c    = conv(q, k) + bias                causal, depthwise, over the last `taps` tokens
    q', k' = conv_h(c) + bias               of each head h by itself, over the last few c
    m    = (q + k) / 2                      of each head of queries, and of a head of keys the mean over its queries
    q, k = q' + m, k' + m                   normalised to √head_dim; a head of keys has a learned factor
    v    = [v, w of the token before]

All of it is float32. A draft's inputs are `[q, k | w]`. See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_recurrent.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .recurrent import RecurrentState, RecurrentWeights

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@dataclass(slots=True)
class HeadConvWeights(RecurrentWeights):
    """A layer's convolutions."""

    taps: torch.Tensor
    """`[size, channels]`: each channel's factors in the first one, of the oldest token first."""

    taps_bias: torch.Tensor
    """`[channels]`."""

    heads: torch.Tensor
    """`[size, heads, head_dim, head_dim]`: matrices of the second one, of inputs to outputs, likewise."""

    heads_bias: torch.Tensor
    """`[channels]`."""

    factors: torch.Tensor
    """`[kv_heads]`, of normalised keys."""

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.prompt`."""
        seen = torch.cat((state.conv[0], self._inputs(rows)))
        state.conv[0] = seen[len(rows) :]
        return self._convolved(seen, len(rows))

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        return self._convolved(self._taken_in(self._inputs(rows), state), 1)

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """Queries, keys and values, as attention takes them."""
        channels, dim, kv_heads = self.taps.shape[1], self.heads.shape[2], len(self.factors)
        own = rows[:, :channels].float().unflatten(1, (-1, dim))
        q, k = own[:, :-kv_heads], own[:, -kv_heads:]
        per_key = q.shape[1] // kv_heads
        mean = (q + k.repeat_interleave(per_key, 1)) * 0.5
        means = torch.cat((mean, mean.unflatten(1, (kv_heads, per_key)).mean(2)), 1)
        x = mixed[:, :channels].unflatten(1, (-1, dim)) + means
        x = x * (dim**0.5 / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).eps))
        q, k = x[:, :-kv_heads], x[:, -kv_heads:] * self.factors[:, None]
        delayed = mixed[:, channels:]
        return torch.cat((q.flatten(1), k.flatten(1), rows[:, channels : -delayed.shape[1]].float(), delayed), 1)

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """`[q, k | w]`."""
        return self._inputs(rows)

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        self._taken_in(inputs, state)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """None: the native library does not compute it."""
        return {}

    def _inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """What later tokens need of these."""
        channels = self.taps.shape[1]
        delayed = (rows.shape[1] - channels) // 2
        return torch.cat((rows[:, :channels], rows[:, -delayed:]), 1).float()

    @staticmethod
    def _taken_in(inputs: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """The inputs of each sequence's last tokens, with one more `[sequences, conv_size, channels]`."""
        seen = torch.cat((state.conv, inputs[:, None]), 1)
        state.conv.copy_(seen[:, 1:])
        return seen

    def _convolved(self, seen: torch.Tensor, count: int) -> torch.Tensor:
        """q', k' and delayed values of each sequence's last `count` tokens, sequence after sequence. seen: the inputs
        of these and of those before them, `[…, tokens, channels]`.
        """
        (size, channels), later = self.taps.shape, len(self.heads) - 1
        length = count + later
        x = seen[..., seen.shape[-2] - length - size + 1 :, :channels]
        first = x[..., :length, :] * self.taps[0]
        for tap in range(1, size):
            first = first + x[..., tap : tap + length, :] * self.taps[tap]
        by_head = (first + self.taps_bias).unflatten(-1, self.heads.shape[1:3])
        second = self._of_heads(by_head[..., :count, :, :], 0)
        for tap in range(1, len(self.heads)):
            second = second + self._of_heads(by_head[..., tap : tap + count, :, :], tap)
        found = second.transpose(0, 1).flatten(1) + self.heads_bias
        return torch.cat((found, seen[..., -count - 1 : -1, channels:].reshape(len(found), -1)), 1)

    def _of_heads(self, x: torch.Tensor, tap: int) -> torch.Tensor:
        """Products of each head's matrix `[heads, rows, head_dim]`. x: `[…, tokens, heads, head_dim]`."""
        return x.reshape(-1, *x.shape[-2:]).transpose(0, 1) @ self.heads[tap]
