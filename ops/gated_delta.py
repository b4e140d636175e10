"""Gated DeltaNet (arXiv 2412.06464): linear attention with a gated delta rule, between a layer's two projections.

For every token t, from its row `[q, k, v | z | b | a]` of the input projection:

    q, k, v = silu(conv(q, k, v))           causal, depthwise, over the last `conv_size` tokens
    q, k    = q / |q| · k_dim^-0.5, k / |k| of each head
    S      ← exp(-exp(A_log) · softplus(a + dt_bias)) · S
    S      ← S + k ⊗ (sigmoid(b) · (v - kᵀS))
    out     = norm(qᵀS) · silu(z)           of each head of values

All of it is float32. A sequence's state is S, and the convolution's last inputs; both go from step to step.

A sequence's last tokens may be drafts. A step stores the state before its drafts, and next to it one row of inputs
`[q, k, v | b | a]` for each draft. The next step first updates the state with the rows of the accepted drafts.

Tests: tests/ops/test_gated_delta.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch.nn.functional import pad, silu, softplus

from .attention import count_prefills
from .gated_delta_schedule import StepConstants


@cache
def _kernels() -> ModuleType:
    from . import gated_delta_triton  # needs triton

    return gated_delta_triton


def _uses_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda


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

    drafts: torch.Tensor | None = None
    """`[sequences, most drafts, channels + 2 · v_heads]`: inputs of the last step's drafts; None where neither that
    step nor this one has any."""

    def of(self, sequences: slice) -> DeltaState:
        """Of some sequences, in the same memory."""
        drafts = None if self.drafts is None else self.drafts[sequences]
        return DeltaState(self.conv[sequences], self.recurrent[sequences], drafts)


def gated_delta(
    mixed: torch.Tensor,
    weights: DeltaWeights,
    state: DeltaState,
    qo_indptr: Sequence[int],
    eps: float,
    accepted: Sequence[int] = (),
    drafts: Sequence[int] = (),
) -> torch.Tensor:
    """Compute the layer between its projections; return `[tokens, v_heads · v_dim]` in the dtype of `mixed`, and
    update `state` in place.

    mixed: `[tokens, channels + v_heads · v_dim + 2 · v_heads]`: rows of the input projection. qo_indptr: sequence i has
    the tokens `qo_indptr[i]` … `qo_indptr[i + 1]`-1; sequences with more than one token come first. eps: of the norm.
    accepted: drafts of the step before that each sequence has accepted; by default none. drafts: the last of the
    tokens of each sequence, fewer than all; by default none.

    A sequence doesn't depend on the others. One token takes the recurrent form; several take the chunked form, on a GPU
    a scan, so how a prompt is cut changes rounding. Drafts take the form of one token.
    """
    count = len(state.conv)
    for index, number in enumerate(accepted):
        if number:
            _take_in(number, weights, state.of(slice(index, index + 1)))
    prefills = count_prefills(qo_indptr, count)
    first = qo_indptr[prefills]
    parts = []
    for index in range(prefills):
        rows, own = mixed[qo_indptr[index] : qo_indptr[index + 1]], state.of(slice(index, index + 1))
        number = drafts[index] if drafts else 0
        parts += _drafted(rows, number, weights, own, eps) if number else [_prompt(rows, weights, own, eps)]
    if prefills < count:
        parts.append(_tokens(mixed[first : first + count - prefills], weights, state.of(slice(prefills, count)), eps))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def step_in_pages(
    out: torch.Tensor,
    mixed: torch.Tensor,
    weights: DeltaWeights,
    eps: float,
    pages: torch.Tensor,
    table: torch.Tensor,
    layer: int,
    constants: StepConstants,
) -> None:
    """As `gated_delta`, of sequences with one known token, in one launch that reads and writes states in pages.

    out: `[tokens, v_heads · v_dim]`; rows of other tokens are left alone. pages: `[pages, elements]` float32. table:
    `[sequences, 4 + 2 · state pages]` int64: for each sequence its first token; how many it has, all drafts but the
    first, or 0; the accepted drafts of the step before; 1 if it begins with a state of zeros; the pages that it reads;
    those that it writes. layer: its index among those with a state.

    The launch's grid depends only on the number of sequences, so it can be captured.
    """
    parts = weights.conv, weights.dt_bias, weights.a_log, weights.norm
    _kernels().step(out, mixed, *parts, eps=eps, pages=pages, table=table, layer=layer, constants=constants)


def _take_in(number: int, weights: DeltaWeights, state: DeltaState) -> None:
    """Let one sequence's state go on over its first drafts of the step before."""
    assert state.drafts is not None
    for row in state.drafts[0, :number].split(1):
        convolved = _convolved_tokens(row[:, : state.conv.shape[2]], weights.conv, state.conv)
        _recurrent(_inputs(convolved, row, weights, state), state.recurrent)


def _drafted(
    mixed: torch.Tensor, number: int, weights: DeltaWeights, state: DeltaState, eps: float
) -> list[torch.Tensor]:
    """Mix one sequence. The state does not include its last tokens, the drafts; their inputs are stored next to it."""
    assert state.drafts is not None
    known, v_heads, channels = mixed[:-number], state.recurrent.shape[1], state.conv.shape[2]
    parts = [(_prompt if len(known) > 1 else _tokens)(known, weights, state, eps)]
    ahead = DeltaState(state.conv.clone(), state.recurrent.clone())
    for index, row in enumerate(mixed[-number:].split(1)):
        state.drafts[0, index, :channels] = row[0, :channels]
        state.drafts[0, index, channels:] = row[0, -2 * v_heads :]
        parts.append(_tokens(row, weights, ahead, eps))
    return parts


def _prompt(mixed: torch.Tensor, weights: DeltaWeights, state: DeltaState, eps: float) -> torch.Tensor:
    """Several tokens of one sequence."""
    rows = mixed.float()
    convolved = _convolved(rows[:, : state.conv.shape[2]], weights.conv, state.conv)
    inputs = _inputs(convolved, rows, weights, state)
    recurrent = state.recurrent[0]
    attended = _kernels().scan(*inputs, recurrent) if _uses_kernels(mixed) else chunked(inputs, recurrent)
    return _gated_norm(attended, rows, weights.norm, eps).to(mixed.dtype)


def _tokens(mixed: torch.Tensor, weights: DeltaWeights, state: DeltaState, eps: float) -> torch.Tensor:
    """One token of each sequence."""
    rows = mixed.float()
    convolved = _convolved_tokens(rows[:, : state.conv.shape[2]], weights.conv, state.conv)
    attended = _recurrent(_inputs(convolved, rows, weights, state), state.recurrent)
    return _gated_norm(attended, rows, weights.norm, eps).to(mixed.dtype)


class DeltaInputs(NamedTuple):
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


def _inputs(convolved: torch.Tensor, rows: torch.Tensor, weights: DeltaWeights, state: DeltaState) -> DeltaInputs:
    """What the delta rule takes of tokens. convolved: `[tokens, channels]`; rows: `[tokens, …]` of the projection."""
    v_heads, k_dim, v_dim = state.recurrent.shape[1:]
    k_size = (convolved.shape[1] - v_heads * v_dim) // 2
    q, k, v = convolved.split((k_size, k_size, v_heads * v_dim), dim=1)
    q, k = (_normalised(each.unflatten(1, (-1, k_dim))) for each in (q, k))
    group = v_heads // q.shape[1]
    q, k = ((q * k_dim**-0.5).repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1))
    b, a = rows[:, -2 * v_heads :].chunk(2, dim=1)
    log_decay = -weights.a_log.exp() * softplus(a + weights.dt_bias)
    return DeltaInputs(q, k, v.unflatten(1, (v_heads, v_dim)), log_decay, b.sigmoid())


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """x / |x| of each head."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _recurrent(inputs: DeltaInputs, state: torch.Tensor) -> torch.Tensor:
    """One token of each sequence: `[sequences, v_heads, v_dim]`. state: `[sequences, v_heads, k_dim, v_dim]`."""
    q, k, v, log_decay, beta = inputs
    state *= log_decay.exp()[..., None, None]
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state += k[..., None] * delta[..., None, :]
    return (state * q[..., None]).sum(-2)


def chunked(inputs: DeltaInputs, state: torch.Tensor) -> torch.Tensor:
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


def _gated_norm(x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: `[tokens, v_heads, v_dim]`; rows: `[tokens, …]` of the projection, with z behind the channels."""
    v_heads, v_dim = x.shape[1:]
    z = rows[:, -v_heads * (v_dim + 2) : -2 * v_heads].unflatten(1, (v_heads, v_dim))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * silu(z)
    return x.flatten(1)
