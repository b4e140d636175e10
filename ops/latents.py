"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434 §2.1, appendix C) between its projections and paged attention.

A token's cache is one latent c, normalised, and one rotated key. Head h has the key `K_h · c` and the value `V_h · c`,
where `[K_h; V_h]` are rows of kv_b_proj. Neither is ever made: a query goes to the latents' space by `K_hᵀ · q`, and
what is attended comes back by `V_h · Σ weight · c`. So both cost the same for a context of any length. An adapter's
`B · A` on kv_b_proj, with the rows `[B_K; B_V]` of a head, goes the same two ways: `Aᵀ · (B_Kᵀ · q)` and
`B_V · (A · Σ weight · c)`.

Shapes: queries `[tokens, heads, key]`, latents `[tokens, heads, kv_rank]`, values `[tokens, heads, value]`; kv_up and
adapters' Bᵀ have `heads · (key + value)` rows and columns, head after head.

Tests: tests/ops/test_latents.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .elementwise import apply_rope
from .rotation import KvSlots, Rotation
from .sgmv import Segments, stacked
from .vectors import scale_outputs

#: Multiplies with the base weights.
Product = Callable[[torch.Tensor], torch.Tensor]


def absorbed(q: torch.Tensor, kv_up: torch.Tensor) -> torch.Tensor:
    """Queries in the latents' space."""
    keys = kv_up.view(q.shape[1], -1, kv_up.shape[1])[:, : q.shape[2]]
    return torch.bmm(q.transpose(0, 1), keys).transpose(0, 1)


def expanded(x: torch.Tensor, kv_up: torch.Tensor, key_dim: int) -> torch.Tensor:
    """Values of attended latents x."""
    values = kv_up.view(x.shape[1], -1, kv_up.shape[1])[:, key_dim:]
    return torch.bmm(x.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


def rotated(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """x: `[tokens, heads, rotated]`."""
    if rotation is None:
        return x
    cos, sin = rotation.cos, rotation.sin
    if rotation.rows is not None:
        cos, sin = cos[rotation.rows], sin[rotation.rows]
    return apply_rope(x, cos[:, None], sin[:, None], rotation.interleaved)


def write_latents(slots: KvSlots, latents: torch.Tensor, keys: torch.Tensor) -> None:
    """Append to the cache, whose values are the first elements of its keys.

    latents: `[tokens, kv_rank]`; keys: `[tokens, 1, rotated]`, rotated.
    """
    kept = torch.cat((latents[:, None], keys), dim=-1)
    slots.k_cache[slots.page, slots.offset] = kept.to(slots.k_cache.dtype)


class AbsorbedLora:
    """Adapters on kv_b_proj in one layer of a step."""

    __slots__ = ("_arena", "_layer", "_module", "_segments", "_width")

    def __init__(self, arena: torch.Tensor, segments: Segments, layer: int, module: int, width: int) -> None:
        """module: the projection's id; width: its outputs."""
        self._arena, self._segments, self._layer, self._module, self._width = arena, segments, layer, module, width

    def absorb(self, q: torch.Tensor, product: Product) -> torch.Tensor:
        """Queries in the latents' space, by the base weights, which is `product(q)`, and adapters.

        Vectors scale the outputs of kv_b_proj, so here they come first.
        """
        q = self._scaled(q, first=0)
        found = product(self._scaled(q, first=0, undo=True))
        for tokens, mask, a, b in self._tiles(found):
            h = torch.bmm(q[tokens].transpose(0, 1), b[:, :, : q.shape[2]].transpose(1, 2))
            found[tokens] += (mask(h) @ a).transpose(0, 1)
        return found

    def expand(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """Values of attended latents, by the base weights, which is `product(x)`, and adapters."""
        found = product(x)
        first = self._width // x.shape[1] - found.shape[2]
        found = self._scaled(found, first=first, undo=True)
        for tokens, mask, a, b in self._tiles(x):
            h = mask(x[tokens].transpose(0, 1) @ a.T)
            found[tokens] += torch.bmm(h, b[:, :, first:]).transpose(0, 1)
        return self._scaled(found, first=first)

    def _tiles(self, latents: torch.Tensor) -> Iterator[tuple[slice, Product, torch.Tensor, torch.Tensor]]:
        """Tokens of neighbouring entries with the rank-rows of all of them: A `[rows, kv_rank]`, and Bᵀ `[heads, rows,
        key + value]`. The function scales products with them `[heads, tokens, rows]`, and zeros those with others'.
        """
        heads, kv_rank = latents.shape[1:]
        for tile in self._segments.tiles():
            used, a, b = [], [], []
            for index, (_, _, rows) in enumerate(tile.entries):
                of_a, of_b = rows.blocks(self._arena, self._layer, self._module, kv_rank, self._width)
                if of_a:
                    used.append(index)
                    a += of_a
                    b += of_b
            if used:
                outputs = stacked(b).to(latents.dtype)
                yield (
                    slice(tile.begin, tile.end),
                    lambda h, tile=tile, used=tuple(used): tile.mask(h, used),
                    stacked(a).to(latents.dtype),
                    outputs.view(len(outputs), heads, -1).transpose(0, 1),
                )

    def _scaled(self, x: torch.Tensor, first: int, *, undo: bool = False) -> torch.Tensor:
        """Adapters' vectors applied to elements from `first` on of each head's outputs; a copy if there are any."""
        if not self._segments.vectors:
            return x
        tokens, heads, elems = x.shape
        outputs = x.new_zeros(tokens, heads, self._width // heads)
        outputs[..., first : first + elems] = x
        modules = ((self._module, 0, self._width),)
        scale_outputs(outputs.view(tokens, -1), self._arena, self._segments, self._layer, modules, undo=undo)
        return outputs[..., first : first + elems]
