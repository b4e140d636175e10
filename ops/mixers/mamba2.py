"""Mamba 2 (arXiv 2405.21060): a state space model with scalar decays, between a layer's two projections.

For every token t, from its row `[z | x, B, C | dt]` of the input projection:

    x, B, C = silu(conv(x, B, C) + bias)    causal, depthwise, over the last `conv_size` tokens
    dt      = softplus(dt + dt_bias)        of each head, as A_log, and as D; at least `dt_min`
    S      ← exp(-exp(A_log) · dt) · S + B ⊗ (dt · x)
    out     = norm((Cᵀ S + D · x) · silu(z)) of each group of heads, which has one B and one C

The norm may be missing, or come before the gate: norm(Cᵀ S + D · x) · silu(z).

All of it is float32. A draft's inputs are `[x, B, C | dt]`. See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_recurrent.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..elementwise.activations import silu, softplus
from .recurrent import CHUNK, RecurrentState, RecurrentWeights, convolve, convolve_tokens, in_chunks

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@dataclass(slots=True)
class MambaWeights(RecurrentWeights):
    """A layer's Mamba 2."""

    conv: torch.Tensor
    """`[conv_size, channels]`: each channel's factors of a token's inputs, of the oldest first."""

    bias: torch.Tensor | None
    """`[channels]`, of the convolution."""

    dt_bias: torch.Tensor
    """`[heads]`."""

    a_log: torch.Tensor
    """`[heads]`."""

    d: torch.Tensor
    """`[heads]`."""

    norm: torch.Tensor | None
    """`[heads · head_dim]`; None: the gated output is not normalised."""

    eps: float
    """Of the norm."""

    num_groups: int
    """Groups of neighbouring heads; of several ranks that share a group, each has some of its heads."""

    group_ranks: int = 1
    """Ranks that share each group."""

    dt_min: float = 0.0
    """The least time step."""

    gates_norm: bool = False
    """The gate multiplies what was normalised."""

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """By chunks: `[tokens, heads · head_dim]`."""
        rows = rows[:, self._size_of(rows) :].float()
        convolved = convolve(rows[:, : state.conv.shape[2]], self.conv, state.conv)
        inputs = self._inputs(convolved, rows, state)
        return (chunked(inputs, state.recurrent[0]) + self._skipped(inputs)).flatten(1)

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        return self._tokens(rows[:, self._size_of(rows) :].float(), state)

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """The norm of the gated output, or the gated output alone, or with its norm."""
        gate = silu(rows[:, : mixed.shape[1]].float())
        if self.norm is None:
            return mixed * gate
        if self.gates_norm:
            return self._normed(mixed, self.norm, ranks) * gate
        return self._normed(mixed * gate, self.norm, ranks)

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """`[x, B, C | dt]`."""
        return rows[:, self._size_of(rows) :].float()

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        self._tokens(inputs, state)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """See `RecurrentWeights.native_tensors`."""
        own = {"taps": self.conv, "dt_bias": self.dt_bias, "a_log": self.a_log, "delta_norm": self.norm}
        return {**own, "conv_bias": self.bias, "d": self.d}

    def _size_of(self, rows: torch.Tensor) -> int:
        """Width of the gate z in rows `[z | x, B, C | dt]`."""
        return rows.shape[1] - self.conv.shape[1] - len(self.dt_bias)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        grouped = x.unflatten(1, (self.num_groups, -1))
        squares = grouped.square().sum(-1, keepdim=True)
        if ranks is not None and self.group_ranks > 1:
            squares = ranks.add_up(squares)
        mean = squares / (grouped.shape[-1] * self.group_ranks)
        return (grouped * torch.rsqrt(mean + self.eps)).flatten(1) * weight

    def _tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """rows: without z."""
        convolved = convolve_tokens(rows[:, : state.conv.shape[2]], self.conv, state.conv)
        inputs = self._inputs(convolved, rows, state)
        return (_recurrent(inputs, state.recurrent) + self._skipped(inputs)).flatten(1)

    def _inputs(self, convolved: torch.Tensor, rows: torch.Tensor, state: RecurrentState) -> MambaInputs:
        heads, width, head_dim = state.recurrent.shape[1:]
        convolved = silu(convolved if self.bias is None else convolved + self.bias)
        shared = self.num_groups * width
        x, b, c = convolved.split((heads * head_dim, shared, shared), 1)
        dt = softplus(rows[:, -heads:] + self.dt_bias).clamp(min=self.dt_min)
        b, c = (each.unflatten(1, (self.num_groups, width)) for each in (b, c))
        return MambaInputs(x.unflatten(1, (heads, head_dim)), b, c, dt, -self.a_log.exp() * dt)

    def _skipped(self, inputs: MambaInputs) -> torch.Tensor:
        return self.d[:, None] * inputs.x


class MambaInputs(NamedTuple):
    """What the recurrence takes."""

    x: torch.Tensor
    """`[tokens, heads, head_dim]`."""

    b: torch.Tensor
    """`[tokens, groups, state]`, as c."""

    c: torch.Tensor
    dt: torch.Tensor
    """`[tokens, heads]`, as log_decay."""

    log_decay: torch.Tensor


def _recurrent(inputs: MambaInputs, state: torch.Tensor) -> torch.Tensor:
    """One token of each sequence: `[sequences, heads, head_dim]`. state: `[sequences, heads, state, head_dim]`."""
    x, b, c, dt, log_decay = inputs
    each = x.shape[1] // b.shape[1]
    b, c = (shared.repeat_interleave(each, 1)[..., None] for shared in (b, c))
    state.mul_(log_decay.exp()[..., None, None]).addcmul_(b, (x * dt[..., None])[..., None, :])
    return (state * c).sum(-2)


def chunked(inputs: MambaInputs, state: torch.Tensor) -> torch.Tensor:
    """One sequence's tokens: `[tokens, heads, head_dim]`, without D. state: `[heads, state, head_dim]`.

    Within a chunk, with the decay D[i, j] = exp(Σ log decays of j + 1 … i) for j <= i, and 0 for others:

        out = (C Bᵀ · D) (dt x) + exp(Σ log decays) C S
    """
    tokens, heads = inputs.x.shape[:2]
    groups = inputs.b.shape[1]
    chunks = -(-tokens // CHUNK)
    x, b, c, dt, log_decay = (in_chunks(each, chunks) for each in inputs)
    x = x * dt[..., None]
    total = log_decay.cumsum(-1)  # [heads, chunks, CHUNK]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    scores = c @ b.transpose(-1, -2)  # [groups, chunks, CHUNK, CHUNK]
    each = heads // groups
    out = (decay.unflatten(0, (groups, each)) * scores[:, None]).flatten(0, 1) @ x
    until_end = (x * (total[..., -1:] - total).exp()[..., None]).unflatten(0, (groups, each))
    since_start, whole = total.exp()[..., None], total[..., -1].exp()[..., None, None]
    grouped = state.unflatten(0, (groups, each))
    for chunk in range(chunks):
        seen = c[:, chunk][:, None] @ grouped
        out[:, chunk] += seen.flatten(0, 1) * since_start[:, chunk]
        added = b[:, chunk].transpose(-1, -2)[:, None] @ until_end[:, :, chunk]
        state.mul_(whole[:, chunk]).add_(added.flatten(0, 1))
    return out.flatten(1, 2)[:, :tokens].transpose(0, 1)
