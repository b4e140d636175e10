"""Gated DeltaNet (arXiv 2412.06464): linear attention with a gated delta rule, between a layer's two projections.

For every token t, from its row `[q, k, v | z | b | a]` of the input projection:

    q, k, v = silu(conv(q, k, v))           causal, depthwise, over the last `conv_size` tokens
    q, k    = q / |q| · k_dim^-0.5, k / |k| of each head
    S      ← exp(-exp(A_log) · softplus(a + dt_bias)) · S
    S      ← S + k ⊗ (sigmoid(b) · (v - kᵀS))
    out     = norm(qᵀS) · silu(z)           of each head of values

All of it is float32. A sequence's state is S, and the convolution's last inputs; both go from step to step.

Tests: tests/ops/test_gated_delta.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad, silu, softplus

from .attention import count_prefills

CHUNK = 64
"""Tokens of a prompt that are computed at once, as in transformers."""


@dataclass(slots=True)
class DeltaWeights:
    """What a layer has besides its projections, in float32."""

    conv: torch.Tensor
    """`[conv_size, channels]`: each channel's factors of a token's inputs, of the oldest first."""

    dt_bias: torch.Tensor
    """`[v_heads]`."""

    a_log: torch.Tensor
    """`[v_heads]`."""

    norm: torch.Tensor
    """`[v_dim]`."""


@dataclass(slots=True)
class DeltaState:
    """The state of a step's sequences in a layer, float32; zeros before a sequence's first token."""

    conv: torch.Tensor
    """`[sequences, conv_size - 1, channels]`: the convolution's last inputs, oldest first."""

    recurrent: torch.Tensor
    """`[sequences, v_heads, k_dim, v_dim]`."""

    def of(self, sequences: slice) -> DeltaState:
        """Of some sequences, in the same memory."""
        return DeltaState(self.conv[sequences], self.recurrent[sequences])


def gated_delta(
    mixed: torch.Tensor, weights: DeltaWeights, state: DeltaState, qo_indptr: Sequence[int], eps: float
) -> torch.Tensor:
    """Compute the layer between its projections; return `[tokens, v_heads · v_dim]` in the dtype of `mixed`, and
    update `state` in place.

    mixed: `[tokens, channels + v_heads · v_dim + 2 · v_heads]`: rows of the input projection. qo_indptr: sequence i has
    the tokens `qo_indptr[i]` … `qo_indptr[i + 1]`-1; sequences with more than one token come first. eps: of the norm.

    A sequence doesn't depend on the others. One token takes the recurrent form, several take the chunked form, so how
    a prompt is cut changes rounding.
    """
    v_heads, _, v_dim = state.recurrent.shape[1:]
    channels = state.conv.shape[2]
    count = len(state.conv)
    prefills = count_prefills(qo_indptr, count)
    first_decode = qo_indptr[prefills]
    rows = mixed.float()
    attended = torch.empty(len(mixed), v_heads, v_dim, dtype=torch.float32, device=mixed.device)
    for index in range(prefills):
        tokens, own = slice(qo_indptr[index], qo_indptr[index + 1]), state.of(slice(index, index + 1))
        inputs = _inputs(_convolved(rows[tokens, :channels], weights.conv, own.conv), rows[tokens], weights, own)
        attended[tokens] = _chunked(inputs, own.recurrent[0])
    if prefills < count:
        decodes = state.of(slice(prefills, count))
        tokens = rows[first_decode : first_decode + count - prefills]
        inputs = _inputs(_convolved_tokens(tokens[:, :channels], weights.conv, decodes.conv), tokens, weights, decodes)
        attended[first_decode : first_decode + count - prefills] = _recurrent(inputs, decodes.recurrent)
    z = rows[:, channels : channels + v_heads * v_dim].unflatten(1, (v_heads, v_dim))
    return _gated_norm(attended, z, weights.norm, eps).flatten(1).to(mixed.dtype)


class _Inputs(NamedTuple):
    """What the delta rule takes."""

    q: torch.Tensor
    """`[tokens, v_heads, k_dim]`, normalised, as k."""

    k: torch.Tensor
    v: torch.Tensor
    """`[tokens, v_heads, v_dim]`."""

    log_decay: torch.Tensor
    """`[tokens, v_heads]`, as beta."""

    beta: torch.Tensor


def _convolved(x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One sequence's tokens `[tokens, channels]`, with its state `[1, conv_size - 1, channels]`."""
    seen = torch.cat((state[0], x))
    state[0] = seen[len(x) :]
    return _weighted([seen[tap : tap + len(x)] for tap in range(len(taps))], taps)


def _convolved_tokens(x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One token `[sequences, channels]` of each sequence, with their states `[sequences, conv_size - 1, channels]`."""
    seen = torch.cat((state, x[:, None]), 1)
    state.copy_(seen[:, 1:])
    return _weighted(seen.unbind(1), taps)


def _weighted(inputs: Sequence[torch.Tensor], taps: torch.Tensor) -> torch.Tensor:
    """inputs: of each tap `[tokens, channels]`."""
    total = inputs[0] * taps[0]
    for x, factors in zip(inputs[1:], taps[1:], strict=True):
        total = total + x * factors
    return silu(total)


def _inputs(convolved: torch.Tensor, rows: torch.Tensor, weights: DeltaWeights, state: DeltaState) -> _Inputs:
    """What the delta rule takes of tokens. convolved: `[tokens, channels]`; rows: `[tokens, …]` of the projection."""
    v_heads, k_dim, v_dim = state.recurrent.shape[1:]
    k_size = (convolved.shape[1] - v_heads * v_dim) // 2
    q, k, v = convolved.split((k_size, k_size, v_heads * v_dim), dim=1)
    q, k = (_normalised(each.unflatten(1, (-1, k_dim))) for each in (q, k))
    group = v_heads // q.shape[1]
    q, k = ((q * k_dim**-0.5).repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1))
    b, a = rows[:, -2 * v_heads :].chunk(2, dim=1)
    log_decay = -weights.a_log.exp() * softplus(a + weights.dt_bias)
    return _Inputs(q, k, v.unflatten(1, (v_heads, v_dim)), log_decay, b.sigmoid())


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """x / |x| of each head."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _recurrent(inputs: _Inputs, state: torch.Tensor) -> torch.Tensor:
    """One token of each sequence: `[sequences, v_heads, v_dim]`. state: `[sequences, v_heads, k_dim, v_dim]`."""
    q, k, v, log_decay, beta = inputs
    state *= log_decay.exp()[..., None, None]
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state += k[..., None] * delta[..., None, :]
    return (state * q[..., None]).sum(-2)


def _chunked(inputs: _Inputs, state: torch.Tensor) -> torch.Tensor:
    """One sequence's tokens; returns `[tokens, v_heads, v_dim]`. state: `[v_heads, k_dim, v_dim]`.

    Within a chunk, with the decay D[i, j] = exp(Σ log decays of j + 1 … i) for j <= i, and 0 for others, the tokens'
    deltas u solve a triangular system:

        (I + tril(β k kᵀ · D, -1)) u = β (v - exp(Σ log decays) k S)
    """
    tokens = len(inputs.q)
    chunks = -(-tokens // CHUNK)
    q, k, v, log_decay, beta = (_in_chunks(each, chunks) for each in inputs)
    total = log_decay.cumsum(-1)  # [v_heads, chunks, CHUNK]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    k_beta, since_start = k * beta[..., None], total.exp()[..., None]
    system = (k_beta @ k.transpose(-1, -2)) * decay
    seen = (q @ k.transpose(-1, -2)) * decay
    of_values, of_state = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (v * beta[..., None], k_beta * since_start)
    )
    q = q * since_start
    k = k * (total[..., -1:] - total).exp()[..., None]
    whole = total[..., -1].exp()[..., None, None]
    out = torch.empty_like(of_values)
    for chunk in range(chunks):
        deltas = of_values[:, chunk] - of_state[:, chunk] @ state
        out[:, chunk] = q[:, chunk] @ state + seen[:, chunk] @ deltas
        state.mul_(whole[:, chunk]).add_(k[:, chunk].transpose(-1, -2) @ deltas)
    return out.flatten(1, 2)[:, :tokens].transpose(0, 1)


def _in_chunks(x: torch.Tensor, chunks: int) -> torch.Tensor:
    """`[tokens, v_heads, …]` as `[v_heads, chunks, CHUNK, …]`, with zeros behind the last token."""
    x = pad(x.transpose(0, 1), (0, 0) * (x.dim() - 2) + (0, chunks * CHUNK - len(x)))
    return x.unflatten(1, (chunks, CHUNK)).contiguous()


def _gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, z: `[tokens, v_heads, v_dim]`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * silu(z)
