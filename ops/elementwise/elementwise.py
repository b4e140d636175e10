"""Elementwise parts of a decoder layer: norms, rotary embedding with the append to the KV cache, gated activation.

On a CPU by torch; on a GPU each is one pass of a kernel in `elementwise_triton`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from . import float8_kv
from .activations import gelu, gelu_tanh, sigmoid, silu, softplus
from .elementwise_schedule import Gating
from .rotation import HeadNorms, KvSlots, NewLatents, Rotation

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@cache
def _kernels() -> ModuleType:
    from . import elementwise_triton  # needs triton

    return elementwise_triton


def _uses_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension, statistics in float32.

    x: `[tokens, hidden]`; on a CPU any number of dimensions. weight: where it is wider than x, the product with it is
    rounded, rather than its factors.
    """
    if _uses_kernels(x):
        return _kernels().rms_norm(x, weight, eps)
    wide = x.float()
    return _weighted(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), weight, x.dtype)


def scaled_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` of `weight · x`, which is rounded first, without weights behind. x: `[rows, width]`; weight: `[width]`
    float32.
    """
    scaled = (x.float() * weight).to(x.dtype)
    return rms_norm(scaled, torch.ones_like(weight), eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`rms_norm` of x less its mean. bias: `[hidden]` float32, as the weight is then, added before the one rounding."""
    if bias is not None:
        return torch.add(layer_norm(x.float(), weight, eps), bias).to(x.dtype)
    if _uses_kernels(x):
        return _kernels().layer_norm(x, weight, eps)
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    return _weighted(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), weight, x.dtype)


def _weighted(wide: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight * wide.to(dtype) if weight.dtype == dtype else (weight * wide).to(dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place; returns the norm of the sum. x, residual: `[tokens, hidden]` of one dtype."""
    if _uses_kernels(x):
        return _kernels().add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)


def add_layer_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`add_rms_norm` with the norm of the sum less its mean."""
    if _uses_kernels(x):
        return _kernels().add_layer_norm(x, residual, weight, eps)
    return layer_norm(residual.add_(x), weight, eps)


class RotaryEmbedding:
    """cos and sin of every position, in the model's dtype."""

    def __init__(
        self,
        inv_freq: torch.Tensor,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        factor: float = 1.0,
        interleaved: bool = False,
        axes: Sequence[int] = (),
    ) -> None:
        """factor: of cos and sin. axes: of each rotated element, see `rows_of_axes`; empty: positions have one."""
        self._axes = torch.tensor(axes, dtype=torch.long, device=device)
        cos, sin = rotary_table(inv_freq, num_positions, factor=factor, interleaved=interleaved)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)
        self._interleaved = interleaved

    def at(self, positions: torch.Tensor, axes: tuple[torch.Tensor, torch.Tensor] | None = None) -> Rotation:
        """positions: `[tokens]` int64. Gathered once a step on a CPU; a GPU's kernels find the rows themselves, unless
        the step has tokens on axes.

        axes: indices of tokens whose positions differ between axes, and these positions `[axes, tokens]`.
        """
        has_axes = axes is not None and len(self._axes)
        if _uses_kernels(positions) and not has_axes:
            return Rotation(self._cos, self._sin, positions, self._interleaved)
        cos, sin = self._cos[positions], self._sin[positions]
        if axes is not None and has_axes:
            places, own = axes
            cos[places], sin[places] = (rows_of_axes(table, self._axes, own) for table in (self._cos, self._sin))
        rows = torch.arange(len(positions), device=positions.device) if _uses_kernels(positions) else None
        return Rotation(cos, sin, rows, self._interleaved)


def rotary_table(
    inv_freq: torch.Tensor, num_positions: int, *, factor: float = 1.0, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`factor` times cos and sin, each `[num_positions, 2·len(inv_freq)]` float32, of position · frequency."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return angles.cos() * factor, angles.sin() * factor


def rows_of_axes(table: torch.Tensor, axes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows `[tokens, dim]` of tokens whose positions differ between axes (M-RoPE).

    table: `[positions, dim]`, of `rotary_table`. axes: `[dim]` int64, the axis of each element. positions: `[axes,
    tokens]` int64.
    """
    return table[positions[axes], torch.arange(len(axes), device=table.device)[:, None]].T


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate heads. x: `[tokens, heads, head_dim]`; cos, sin: `[tokens, 1, dim]` of x's dtype, of which `dim` may be
    less than head_dim: the rest of a head stays.
    """
    dim = cos.shape[-1]
    turned, kept = x[..., :dim], x[..., dim:]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), dim=-1)
    turned = turned * cos + other * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def rotate_and_write(
    qkv: torch.Tensor,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    slots: KvSlots,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate the heads of q and k, append k and v to the cache, return q `[tokens, heads, head_dim]`.

    qkv: `[tokens, (heads + 2 · kv_heads) · head_dim]`, packed. out: of q's shape, contiguous, to write q to. rotation:
    None: heads stay.
    """
    kv_heads, head_dim = slots.k_cache.shape[2:]
    if _uses_kernels(qkv) and (norms is None or (norms.ranks is None and not norms.own)):
        return _kernels().rotate_and_write(qkv, rotation, norms, slots, out)
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((num_heads, kv_heads, kv_heads), dim=1)
    if norms is not None and norms.ranks is not None:
        q, k = _normed_by_ranks(q, k, norms, norms.ranks)
    elif norms is not None and norms.own:
        q, k = _own_norms(q, norms.q, norms.eps), _own_norms(k, norms.k, norms.eps)
    elif norms is not None:
        q, k = _normed_heads(q, norms.q, norms.eps), _normed_heads(k, norms.k, norms.eps)
    if rotation is not None:
        cos, sin = _angles(rotation)
        q, k = (apply_rope(x, cos, sin, rotation.interleaved) for x in (q, k))
    write_kv(slots, k, v)
    return q.contiguous() if out is None else out.copy_(q)


def rotate(
    q: torch.Tensor,
    rotation: Rotation | None,
    norm: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rotate_and_write` of queries alone, `[tokens, heads, head_dim]`. norm: `[head_dim]`; None: there is none."""
    q = q if norm is None else _normed_heads(q, norm, eps)
    if rotation is not None:
        q = apply_rope(q, *_angles(rotation), rotation.interleaved)
    return q.contiguous() if out is None else out.copy_(q)


def write_latents(
    q: torch.Tensor, new: NewLatents, rotation: Rotation | None, slots: KvSlots, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise latents, rotate their keys, append both to the cache; rotate the last elements of queries.

    q: `[tokens, heads, key + rotated]`; out: of its shape, contiguous, to write it to. Returns it.
    """
    if _uses_kernels(q):
        return _kernels().write_latents(q, new, rotation, slots, out)
    latents, keys = new.kept.split((new.kv_rank, new.kept.shape[1] - new.kv_rank), 1)
    if new.norm is not None:
        latents = rms_norm(latents, new.norm, new.eps)
    own, turned = q.split((q.shape[2] - keys.shape[1], keys.shape[1]), 2)
    if rotation is not None:
        angles = _angles(rotation)
        keys, turned = (apply_rope(x, *angles, rotation.interleaved) for x in (keys[:, None], turned))
    kept = torch.cat((latents, keys.flatten(1)), 1)[:, None]
    slots.k_cache[slots.page, slots.offset] = kept.to(slots.k_cache.dtype)
    return torch.cat((own, turned), 2, out=out)


def _angles(rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each token, `[tokens, 1, dim]`."""
    cos, sin = rotation.cos, rotation.sin
    if rotation.rows is not None:
        cos, sin = cos[rotation.rows], sin[rotation.rows]
    return cos[:, None], sin[:, None]


def _normed_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: `[tokens, heads, head_dim]`, normalised by head, or all heads of a token at once by a longer weight."""
    return rms_norm(x.reshape(-1, len(weight)), weight, eps).view(x.shape)


def _own_norms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: `[tokens, heads, head_dim]`. weight: see `HeadNorms.own`."""
    ones = torch.ones(x.shape[-1], dtype=torch.float32, device=x.device)
    normed = layer_norm(x.float().reshape(-1, x.shape[-1]), ones, eps).view(x.shape)
    if weight.dim() == 2:
        return (normed * weight[0].float() + weight[1].float()).to(x.dtype)
    return _weighted(normed, weight.view(x.shape[1:]), x.dtype)


def _normed_by_ranks(
    q: torch.Tensor, k: torch.Tensor, norms: HeadNorms, ranks: Collectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k `[tokens, heads, head_dim]` of this rank, normalised with all heads of a token at once: the ranks add up
    their heads' squares in float32. Of ranks with the same K/V heads, the first adds their squares.
    """
    squares = torch.stack([x.float().square().sum((1, 2)) for x in (q, k)])
    if ranks.rank % norms.kv_copies:
        squares[1] = 0
    q_squares, k_squares = ranks.add_up(squares)
    q_factor = torch.rsqrt(q_squares / (len(norms.q) * ranks.size) + norms.eps)
    k_factor = torch.rsqrt(k_squares / (len(norms.k) * ranks.size // norms.kv_copies) + norms.eps)
    return _scaled_heads(q, q_factor, norms.q), _scaled_heads(k, k_factor, norms.k)


def _scaled_heads(x: torch.Tensor, factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: `[tokens, heads, head_dim]`; factor: `[tokens]` float32."""
    return _weighted(x.float() * factor[:, None, None], weight.view(x.shape[1:]), x.dtype)


def write_kv(slots: KvSlots, k: torch.Tensor, v: torch.Tensor) -> None:
    """`k_cache[page[t], offset[t]] = k[t]` for every token t, and v likewise.

    k, v: `[tokens, kv_heads, head_dim]`, rounded to the cache's dtype; see `float8_kv` for FP8.
    """
    k_cache, v_cache, page, offset, scales = slots
    if k_cache.dtype == float8_kv.DTYPE:
        k, v = float8_kv.rounded(k, scales.k), float8_kv.rounded(v, scales.v)
        # bytes: indexed writes of FP8 are not implemented on every device
        k_cache, v_cache, k, v = (each.view(torch.uint8) for each in (k_cache, v_cache, k, v))
    k_cache[page, offset] = k.to(k_cache.dtype)
    v_cache[page, offset] = v.to(v_cache.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up` for packed `[tokens, 2·ffn]` → `[tokens, ffn]`."""
    if _uses_kernels(gate_up):
        return _kernels().gate_and_mul(gate_up, Gating.SILU)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) · up`, gelu by its approximation with tanh, for packed `[tokens, 2·ffn]` → `[tokens, ffn]`."""
    if _uses_kernels(gate_up):
        return _kernels().gate_and_mul(gate_up, Gating.GELU)
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def gelu_by_erf_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) · up`, gelu by the normal distribution, for packed `[tokens, 2·ffn]` → `[tokens, ffn]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate) * up


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`(up + 1) · gate · sigmoid(alpha · gate)`, with gate at most `limit` and up within ± `limit`, for packed
    `[tokens, 2·ffn]` → `[tokens, ffn]`.
    """
    if _uses_kernels(gate_up):
        return _kernels().gate_and_mul(gate_up, Gating.CLAMPED_SWIGLU, alpha, limit)
    gate, up = gate_up.clamp(max=limit).chunk(2, dim=-1)
    return (up.clamp(min=-limit) + 1) * (gate * sigmoid(alpha * gate))


def limited_swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu(gate) · up`, with gate at most `limit` and up within ± `limit`, for packed `[tokens, 2·ffn]` → `[tokens,
    ffn]`.
    """
    gate_up = gate_up.clamp(max=limit)
    gate_up[..., gate_up.shape[-1] // 2 :].clamp_(min=-limit)
    return silu_and_mul(gate_up)


def bounded_silu_and_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu(gate) · up`, with silu(gate) at most `limit` and up within ± `limit`, for packed `[tokens, 2·ffn]` →
    `[tokens, ffn]`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """`max(x, 0)²`."""
    return torch.relu(x).square()


def relu_squared_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`max(gate, 0)² · up` for packed `[tokens, 2·ffn]` → `[tokens, ffn]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return relu_squared(gate) * up


def xielu(x: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """xIELU (arXiv 2411.13010): `α_p·x² + β·x` where x is above 0, else `(exp(min(x, ε)) - 1 - x)·α_n + β·x`.

    parameters: `[4]` float32: a_p, a_n, β and ε, with `α_p = softplus(a_p)` and `α_n = β + softplus(a_n)`. Computed in
    float32, and rounded once.
    """
    positive, negative, beta, eps = parameters.unbind()
    positive, negative = softplus(positive), beta + softplus(negative)
    wide = x.float()
    below = (torch.expm1(torch.minimum(wide, eps)) - wide) * negative
    return (torch.where(wide > 0, positive * wide * wide, below) + beta * wide).to(x.dtype)


def split_gates(qkv: torch.Tensor, num_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Part a projection in which each head's query is followed by a gate of its output.

    qkv: `[tokens, 2 · heads · head_dim + …]`. Returns it without gates, and the gates `[tokens, heads · head_dim]`.
    """
    size = num_heads * head_dim
    q, gates = qkv[:, : 2 * size].unflatten(1, (num_heads, 2, head_dim)).unbind(2)
    return torch.cat((q.flatten(1), qkv[:, 2 * size :]), 1), gates.flatten(1)


def split_gates_per_element(qkv: torch.Tensor, num_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise, of one whose last columns `[tokens, heads · head_dim]` are the gates."""
    size = num_heads * head_dim
    return qkv[:, :-size].contiguous(), qkv[:, -size:]


def split_gates_per_head(qkv: torch.Tensor, num_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise, of one whose last columns `[tokens, heads]` are a gate of each head."""
    return qkv[:, :-num_heads].contiguous(), qkv[:, -num_heads:].repeat_interleave(head_dim, dim=1)


def with_normed_values(
    qkv: torch.Tensor, kv_size: int, weight: torch.Tensor, eps: float, *, keys_are_values: bool = False
) -> torch.Tensor:
    """A projection to queries, keys and values, with every head of values normalised.

    qkv: `[tokens, (heads + 2 · kv_heads) · head_dim]`. weight: `[head_dim]`. keys_are_values: qkv has no values; they
    are the keys.
    """
    v = qkv[:, -kv_size:].reshape(-1, len(weight))
    rest = qkv if keys_are_values else qkv[:, :-kv_size]
    return torch.cat((rest, rms_norm(v, weight, eps).view(len(qkv), kv_size)), 1)


def gate_output(attended: torch.Tensor, gates: torch.Tensor, *, softplus: bool = False) -> torch.Tensor:
    """`attended · sigmoid(gates)`, both `[tokens, heads · head_dim]`. softplus: `log(1 + e^gates)` in its place."""
    if softplus:
        return attended * torch.nn.functional.softplus(gates.float()).to(attended.dtype)
    return attended * sigmoid(gates)
