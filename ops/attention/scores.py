"""How a layer turns q · k into weights, and attention that makes these scores.

Tests: tests/ops/attention/test_attention.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from .blocks import BlockMask


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns q · k into weights: `softmax(cap(scale · q · k))` over the keys that a query sees."""

    scale: float | None = None
    """None: head_dim^-0.5."""

    window: int | None = None
    """Keys that a query sees, its own included; None: all up to its own."""

    softcap: float | None = None
    """`cap(s) = softcap · tanh(s / softcap)`."""

    has_sinks: bool = False
    """Each head has a sink, which `Attention.run` takes: one more score in the softmax, of a value of zeros."""

    blocks: BlockMask = BlockMask.NONE
    """What a query sees of its token's block, where a step has blocks."""

    has_slopes: bool = False
    """Each head has a slope, which `Attention.run` takes: a score loses it for each token between its key and the query
    (ALiBi, arXiv 2108.12409).
    """


#: Scores that are made at once where attention makes them, which soft caps, sinks, slopes and latents ask for: in
#: float32 256 MiB.
MOST_SCORES = 1 << 26

PLAIN = Scores()
"""Attention as in "Attention Is All You Need", causal."""


class HeadTerms(NamedTuple):
    """What a layer has for each of its query heads, `[heads]`; None where it has none."""

    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    terms: HeadTerms,
    own: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of rows with equally many tokens and keys, by scores where torch's own can't give it.

    q: `[rows, heads, tokens, head_dim]`; k, v: `[rows, kv_heads, keys, head_dim]`. mask: None: plain causal. own:
    the index of each token among the keys, `[rows, tokens]`, where heads have slopes.
    """
    group, (sinks, slopes) = q.shape[1] // k.shape[1], terms
    if scores.softcap is None and sinks is None and slopes is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=group > 1
        )
    assert mask is not None
    if group > 1:
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    most = max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    if q.shape[2] > most:
        parts = q.split(most, dim=2), mask.split(most, dim=-2)
        indices = [None] * len(parts[0]) if own is None else own.split(most, dim=1)
        each = zip(*parts, indices, strict=True)
        return torch.cat([attend(rows, k, v, seen, scores, terms, at) for rows, seen, at in each], dim=2)
    weights = (q @ k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if slopes is not None and own is not None:
        ages = own[:, None, :, None] - torch.arange(k.shape[2], device=q.device)
        weights = weights.float() - slopes.float()[:, None, None] * ages
    weights = weights.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        own = sinks.to(weights.dtype).view(1, -1, 1, 1).expand(len(weights), -1, weights.shape[2], 1)
        weights = torch.cat((weights, own), dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
    else:
        weights = weights.softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ v
