"""Gated DeltaNet (arXiv 2412.06464): linear attention with a gated delta rule, between a layer's two projections.

For every token t, from its row `[q, k, v | z | b | a]` of the input projection:

    q, k, v = silu(conv(q, k, v))           causal, depthwise, over the last `conv_size` tokens
    q, k    = q / |q| · k_dim^-0.5, k / |k| of each head
    S      ← exp(-exp(A_log) · softplus(a + dt_bias)) · S
    S      ← S + k ⊗ (beta · sigmoid(b) · (v - kᵀS))     with a constant beta, usually 1
    out     = norm(qᵀS) · silu(z)           of each head of values

With decays of channels (Kimi Delta Attention, arXiv 2510.26692), a has an element for each channel of each head's keys,
whose rows of S decay by it, and `sigmoid(z)` takes the place of `silu(z)`. With a bound below 0, such a decay is
`exp(bound · sigmoid(exp(A_log) · (a + dt_bias)))`.

All of it is float32. A draft's inputs are `[q, k, v | b | a]`. See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_gated_delta.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..elementwise.activations import sigmoid, silu, softplus
from .gated_delta_schedule import StepConstants
from .recurrent import CHUNK, RecurrentState, RecurrentWeights, convolve, convolve_tokens, in_chunks

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@cache
def _kernels() -> ModuleType:
    from . import gated_delta_triton  # needs triton

    return gated_delta_triton


def _uses_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda


@dataclass(slots=True)
class DeltaWeights(RecurrentWeights):
    """A layer's Gated DeltaNet."""

    conv: torch.Tensor
    """`[conv_size, channels]`: each channel's factors of a token's inputs, of the oldest first."""

    dt_bias: torch.Tensor
    """`[v_heads]`, or with decays of channels `[v_heads · k_dim]`."""

    a_log: torch.Tensor
    """`[v_heads]`."""

    norm: torch.Tensor
    """`[v_dim]`."""

    eps: float
    """Of the norm."""

    beta: float = 1.0
    """Factor of how much of a new value enters the state."""

    by_channel: bool = False
    """Each channel of a key has a decay, and gates are sigmoids."""

    bound: float = 0.0
    """The least logarithm of a channel's decay; 0: there is none."""

    sigmoid_gates: bool | None = None
    """Gates are sigmoids; None: if each channel has a decay."""

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """By chunks, on a GPU by a scan: `[tokens, v_heads · v_dim]`."""
        rows = rows.float()
        convolved = silu(convolve(rows[:, : state.conv.shape[2]], self.conv, state.conv))
        inputs = _inputs(convolved, rows, self, state)
        recurrent, has_kernel = state.recurrent[0], _uses_kernels(rows) and not self.by_channel
        return (_kernels().scan(*inputs, recurrent) if has_kernel else chunked(inputs, recurrent)).flatten(1)

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        rows = rows.float()
        convolved = silu(convolve_tokens(rows[:, : state.conv.shape[2]], self.conv, state.conv))
        return _recurrent(_inputs(convolved, rows, self, state), state.recurrent).flatten(1)

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """The gated norm. Rows have z behind the channels."""
        v_heads, v_dim = len(self.a_log), len(self.norm)
        x = mixed.unflatten(1, (v_heads, v_dim))
        first = self.conv.shape[1]
        z = rows[:, first : first + v_heads * v_dim].float().unflatten(1, (v_heads, v_dim))
        is_sigmoid = self.by_channel if self.sigmoid_gates is None else self.sigmoid_gates
        gates = sigmoid(z) if is_sigmoid else silu(z)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.norm * gates
        return x.flatten(1)

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """`[q, k, v | b | a]`."""
        last = len(self.a_log) + len(self.dt_bias)
        return torch.cat((rows[:, : state.conv.shape[2]], rows[:, -last:]), 1).float()

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        convolved = silu(convolve_tokens(inputs[:, : state.conv.shape[2]], self.conv, state.conv))
        _recurrent(_inputs(convolved, inputs, self, state), state.recurrent)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """See `RecurrentWeights.native_tensors`."""
        return {"taps": self.conv, "dt_bias": self.dt_bias, "a_log": self.a_log, "delta_norm": self.norm}


def step_in_pages(
    out: torch.Tensor,
    mixed: torch.Tensor,
    weights: DeltaWeights,
    pages: torch.Tensor,
    table: torch.Tensor,
    layer: int,
    constants: StepConstants,
) -> None:
    """As `DeltaWeights.mix`, of sequences with one known token, in one launch that reads and writes states in pages.

    out: `[tokens, v_heads · v_dim]`; rows of other tokens are left alone. pages: `[pages, elements]` float32. table:
    `[sequences, 4 + 2 · state pages]` int64: for each sequence its first token; how many it has, all drafts but the
    first, or 0; the accepted drafts of the step before; 1 if it begins with a state of zeros; the pages that it reads;
    those that it writes. layer: its index among those with a state.

    The launch's grid depends only on the number of sequences, so it can be captured.
    """
    parts = weights.conv, weights.dt_bias, weights.a_log, weights.norm
    _kernels().step(out, mixed, *parts, eps=weights.eps, pages=pages, table=table, layer=layer, constants=constants)


class DeltaInputs(NamedTuple):
    """What the delta rule takes."""

    q: torch.Tensor
    """`[tokens, v_heads, k_dim]`, normalised, as k."""

    k: torch.Tensor
    v: torch.Tensor
    """`[tokens, v_heads, v_dim]`."""

    log_decay: torch.Tensor
    """`[tokens, v_heads]`, or of channels `[tokens, v_heads, k_dim]`."""

    beta: torch.Tensor
    """`[tokens, v_heads]`."""


def _inputs(convolved: torch.Tensor, rows: torch.Tensor, weights: DeltaWeights, state: RecurrentState) -> DeltaInputs:
    """What the delta rule takes of tokens. convolved: `[tokens, channels]`; rows: `[tokens, …]` of the projection."""
    v_heads, k_dim, v_dim = state.recurrent.shape[1:]
    k_size = (convolved.shape[1] - v_heads * v_dim) // 2
    q, k, v = convolved.split((k_size, k_size, v_heads * v_dim), dim=1)
    q, k = (_normalised(each.unflatten(1, (-1, k_dim))) for each in (q, k))
    group = v_heads // q.shape[1]
    q, k = ((q * k_dim**-0.5).repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1))
    last = v_heads, len(weights.dt_bias)
    b, a = rows[:, -sum(last) :].split(last, dim=1)
    log_decay = _log_decay(a + weights.dt_bias, weights, k_dim)
    return DeltaInputs(q, k, v.unflatten(1, (v_heads, v_dim)), log_decay, sigmoid(b) * weights.beta)


def _log_decay(rates: torch.Tensor, weights: DeltaWeights, k_dim: int) -> torch.Tensor:
    """See `DeltaInputs.log_decay`. rates: `[tokens, decays]`."""
    if not weights.by_channel:
        return -weights.a_log.exp() * softplus(rates)
    own = weights.a_log.exp()[:, None]
    if weights.bound:
        return weights.bound * sigmoid(own * rates.unflatten(1, (-1, k_dim)))
    return -own * softplus(rates).unflatten(1, (-1, k_dim))


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """x / |x| of each head."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _recurrent(inputs: DeltaInputs, state: torch.Tensor) -> torch.Tensor:
    """One token of each sequence: `[sequences, v_heads, v_dim]`. state: `[sequences, v_heads, k_dim, v_dim]`."""
    q, k, v, log_decay, beta = inputs
    state *= _of_channels(log_decay).exp()[..., None]
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state += k[..., None] * delta[..., None, :]
    return (state * q[..., None]).sum(-2)


def _of_channels(log_decay: torch.Tensor) -> torch.Tensor:
    """`[tokens, v_heads, k_dim]`, or `[tokens, v_heads, 1]` where a head has one decay."""
    return log_decay if log_decay.dim() == 3 else log_decay[..., None]


def chunked(inputs: DeltaInputs, state: torch.Tensor) -> torch.Tensor:
    """One sequence's tokens; returns `[tokens, v_heads, v_dim]`. state: `[v_heads, k_dim, v_dim]`.

    Within a chunk, with the decay D[i, j] = exp(Σ log decays of j + 1 … i) for j <= i, and 0 for others, the tokens'
    deltas u solve a triangular system:

        (I + tril(β k kᵀ · D, -1)) u = β (v - exp(Σ log decays) k S)

    With decays of channels, each channel's share of the products k kᵀ and q kᵀ has a D of its own.
    """
    tokens = len(inputs.q)
    chunks = -(-tokens // CHUNK)
    q, k, v, log_decay, beta = (
        in_chunks(each, chunks) for each in inputs._replace(log_decay=_of_channels(inputs.log_decay))
    )
    total = log_decay.cumsum(-2)  # [v_heads, chunks, CHUNK, k_dim or 1]
    k_beta, since_start = k * beta[..., None], total.exp()
    products = _products_by_channel if inputs.log_decay.dim() == 3 else _products
    system, seen = products((k_beta, q), k, total)
    of_values, of_state = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (v * beta[..., None], k_beta * since_start)
    )
    q = q * since_start
    k = k * (total[..., -1:, :] - total).exp()
    whole = total[..., -1, :].exp()[..., None]
    out = torch.empty_like(of_values)
    for chunk in range(chunks):
        deltas = of_values[:, chunk] - of_state[:, chunk] @ state
        out[:, chunk] = q[:, chunk] @ state + seen[:, chunk] @ deltas
        state.mul_(whole[:, chunk]).add_(k[:, chunk].transpose(-1, -2) @ deltas)
    return out.flatten(1, 2)[:, :tokens].transpose(0, 1)


def _products(lefts: Sequence[torch.Tensor], right: torch.Tensor, total: torch.Tensor) -> Iterator[torch.Tensor]:
    """`left · rightᵀ · D` for each left, 0 above the diagonal; see `chunked`. total: `[…, CHUNK, 1]`."""
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=right.device).triu(1)
    decay = (total - total.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    return ((left @ right.transpose(-1, -2)) * decay for left in lefts)


def _products_by_channel(
    lefts: Sequence[torch.Tensor], right: torch.Tensor, total: torch.Tensor
) -> Iterator[torch.Tensor]:
    """As `_products`, with a D of each channel. total: `[…, CHUNK, k_dim]`."""
    return (_decayed(left, right, total) for left in lefts)


def _decayed(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """`Σ left[i, c] · right[j, c] · exp(total[i, c] - total[j, c])` over channels c for j <= i, 0 for others.

    By halves: each factor of a product between halves is a decay from or to the end of the first one, at most 1, so
    that none overflows however strong decays are. left, right, total: `[…, tokens, k_dim]`, tokens a power of two.
    """
    tokens = left.shape[-2]
    if tokens == 1:
        return (left * right).sum(-1, keepdim=True)
    half = tokens // 2
    border = total[..., half - 1 : half, :]
    later = left[..., half:, :] * (total[..., half:, :] - border).exp()
    sooner = right[..., :half, :] * (border - total[..., :half, :]).exp()
    first, last = _decayed(*(each.unflatten(-2, (2, half)) for each in (left, right, total))).unbind(-3)
    out = left.new_zeros(*left.shape[:-1], tokens)
    out[..., :half, :half], out[..., half:, half:] = first, last
    out[..., half:, :half] = later @ sooner.transpose(-1, -2)
    return out
