"""Values for the heads of a step: angles to rotate them by, norms before that, and where their K and V go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .float8_kv import UNSCALED, KvScales

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@dataclass(slots=True)
class Rotation:
    """A step's angles: token t's are in row `rows[t]` of cos and sin, in row t where `rows` is None.

    cos, sin: `[…, dim]` of the model's dtype, for the first `dim` elements of a head. rows: `[tokens]` int64.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None

    interleaved: bool = False
    """Elements 2i and 2i + 1 rotate together, rather than i and i + dim / 2."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of queries and keys before they are rotated. q, k: `[head_dim]` for every head by itself (Qwen3), or
    `[heads · head_dim]` for all heads of a token at once (OLMo 2).
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float

    ranks: Collectives | None = None
    """TP ranks that have shares of the heads; None where the norm needs no heads of other ranks."""

    kv_copies: int = 1
    """Ranks, of `ranks`, that have the same K/V heads."""

    own: bool = False
    """LayerNorm of every head by itself, with weights `[heads · head_dim]` of its own (Command R+), or with weights and
    biases `[2, head_dim]` that all heads have (Persimmon).
    """


class NewLatents(NamedTuple):
    """A step's latents and the keys beside them, `kept`: `[tokens, kv_rank + rotated]`, neither normalised nor rotated.

    norm: `[kv_rank]`, of latents (RMSNorm); None: there is none.
    """

    kept: torch.Tensor
    kv_rank: int
    norm: torch.Tensor | None
    eps: float


class KvSlots(NamedTuple):
    """Where the K and V of a step's tokens go.

    k_cache, v_cache: a layer's, `[num_pages, block_tokens, kv_heads, head_dim]`, of one shape and the same strides; of
    latents the first one holds both.
    page, offset: `[tokens]` int64; padding tokens point at the dummy page. scales: of a cache in FP8.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    scales: KvScales = UNSCALED
