"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434 §2.1, appendix C) between its projections and the cache.

A token's cache is one latent c, normalised, and one rotated key. Head h has the key `K_h · c` and the value `V_h · c`,
where `[K_h; V_h]` are rows of kv_b_proj. There are two ways to attend:

* Absorbed: neither is made. A query goes to the latents' space by `K_hᵀ · q`, and what is attended comes back by
  `V_h · Σ weight · c`. A token costs more for each one that it sees, but nothing is done for those before it.
* Made: keys and values of all that a chunk sees are made, and forgotten. It takes less from `break_even` tokens on.

An adapter's `B · A` on kv_b_proj, with the rows `[B_K; B_V]` of a head, goes the same ways. A bias `[b_K; b_V]` of the
outputs adds `q · b_K` to all scores of a query, which their softmax takes away again, and b_V to what is attended,
since weights add up to one. So queries ignore it, and values have it. Beside sinks they don't: no bias is served there
(`Projection.why_no_bias`).

Shapes: queries `[tokens, heads, key]`, latents `[tokens, heads, kv_rank]`, values `[tokens, heads, value]`; kv_up and
adapters' Bᵀ have `heads · (key + value)` rows and columns, head after head.

Tests: tests/ops/attention/test_latents.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ..lora.sgmv import Segments, stacked
from ..lora.vectors import scale_outputs, vectors_of

#: More tokens than any chunk has.
NEVER = 1 << 40

#: Elements of keys and values that are made at once: of float32 128 MiB.
_MADE = 1 << 25

#: Multiplies with the base weights.
Product = Callable[[torch.Tensor], torch.Tensor]


def absorbed(q: torch.Tensor, kv_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Queries in the latents' space, in `out` if that is given."""
    keys = kv_up.view(q.shape[1], -1, kv_up.shape[1])[:, : q.shape[2]]
    return torch.bmm(q.transpose(0, 1), keys, out=None if out is None else out.transpose(0, 1)).transpose(0, 1)


def expanded(x: torch.Tensor, kv_up: torch.Tensor, key_dim: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Values of attended latents x, in `out` if that is given."""
    values = kv_up.view(x.shape[1], -1, kv_up.shape[1])[:, key_dim:].transpose(1, 2)
    return torch.bmm(x.transpose(0, 1), values, out=None if out is None else out.transpose(0, 1)).transpose(0, 1)


class LatentHeads:
    """A layer's ways between heads and latents, with what a step's adapters add."""

    __slots__ = ("_bias", "_kv_up", "_lora", "_num_heads", "key_dim", "kv_rank", "rotated_dim", "value_dim")

    def __init__(
        self,
        kv_up: torch.Tensor,
        num_heads: int,
        key_dim: int,
        rotated_dim: int,
        lora: AbsorbedLora | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """bias: of kv_up's rows."""
        self._kv_up, self._num_heads, self._lora, self._bias = kv_up, num_heads, lora, bias
        self.key_dim, self.rotated_dim, self.kv_rank = key_dim, rotated_dim, kv_up.shape[1]
        self.value_dim = len(kv_up) // num_heads - key_dim

    @property
    def break_even(self) -> int:
        """Tokens of a chunk from which on keys and values are made: then that takes fewer operations."""
        key = self.key_dim + self.rotated_dim
        less = 2 * self.kv_rank + self.rotated_dim - key - max(key, self.value_dim)
        return -(-self.kv_rank * (self.key_dim + self.value_dim) // less) if less > 0 else NEVER

    def absorb(self, q: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Queries `[tokens, heads, key + rotated]` over what is kept `[…, kv_rank + rotated]`. first: the step's token
        of the first row.
        """
        own, turned = q.split((self.key_dim, self.rotated_dim), 2)
        if self._lora is not None:
            found = self._lora.of(first, len(q)).absorb(own, partial(absorbed, kv_up=self._kv_up))
            return torch.cat((found, turned), dim=2)
        found = q.new_empty(*q.shape[:2], self.kv_rank + self.rotated_dim)
        absorbed(own, self._kv_up, out=found[..., : self.kv_rank])
        found[..., self.kv_rank :] = turned
        return found

    def expand(self, x: torch.Tensor, out: torch.Tensor, first: int = 0) -> None:
        """Write values of attended latents to `out`. first: see `absorb`."""
        if self._lora is None:
            self._expanded(x, out)
        else:
            out.copy_(self._lora.of(first, len(x)).expand(x, self._expanded))

    def _expanded(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Values of attended latents by the base weights, in `out` if that is given."""
        values = expanded(x, self._kv_up, self.key_dim, out)
        if self._bias is None:
            return values
        return values.add_(self._bias.view(self._num_heads, -1)[:, self.key_dim :])

    def made(self, latents: torch.Tensor, token: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Keys and values `[heads, latents, …]` of latents `[latents, kv_rank]` for some heads after others.

        token: of the step, whose adapters they are for.
        """
        width = len(self._kv_up) // self._num_heads
        count = max(1, _MADE // max(1, len(latents) * width))
        added = () if self._lora is None else self._lora.terms(token, latents)
        for first in range(0, self._num_heads, count):
            heads = slice(first, min(first + count, self._num_heads))
            columns = slice(heads.start * width, heads.stop * width)
            found = latents @ self._kv_up[columns].T
            if self._bias is not None:
                found += self._bias[columns]
            for term in added:
                term(found, columns)
            made = found.unflatten(1, (-1, width)).transpose(0, 1)
            keys, values = made.split((self.key_dim, self.value_dim), 2)
            yield heads, keys, values


class AbsorbedLora:
    """Adapters on kv_b_proj in one layer of a step."""

    __slots__ = ("_arena", "_layer", "_module", "_segments", "_width")

    def __init__(self, arena: torch.Tensor, segments: Segments, layer: int, module: int, width: int) -> None:
        """module: the projection's id; width: its outputs."""
        self._arena, self._segments, self._layer, self._module, self._width = arena, segments, layer, module, width

    def absorb(self, q: torch.Tensor, product: Product) -> torch.Tensor:
        """Queries in the latents' space, by the base weights, which is `product(q)`, and adapters.

        Vectors scale the outputs of kv_b_proj, so here they come first. Offsets of keys change no weight.
        """
        q = self._scaled(q, first=0, offsets=False)
        found = product(self._scaled(q, first=0, undo=True, offsets=False))
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

    def of(self, first: int, count: int) -> AbsorbedLora:
        """Of some of the step's tokens alone."""
        if not first and count >= max(self._segments.end, default=0):
            return self
        segments = self._segments.within(first, first + count)
        return AbsorbedLora(self._arena, segments, self._layer, self._module, self._width)

    def terms(self, token: int, latents: torch.Tensor) -> Sequence[Callable[[torch.Tensor, slice], None]]:
        """What the adapters of a token of the step do to some columns of kv_b_proj's outputs for latents, in place."""
        undone, added, scaled = list[_Term](), list[_Term](), list[_Term]()
        for begin, end, rows in self._segments:
            if not begin <= token < end:
                continue
            if (vectors := vectors_of(rows, self._arena, self._layer, self._module, self._width)) is not None:
                is_undone = rows.scale < 0
                change = partial(_undo if is_undone else _scale, factors=vectors[0], offsets=vectors[1])
                (undone if is_undone else scaled).append(change)
            a, b = rows.matrices(self._arena, self._layer, self._module, latents.shape[1], self._width)
            if a is not None and b is not None:
                added.append(partial(_add, h=(latents @ a.to(latents.dtype).T) * rows.scale, b=b.to(latents.dtype)))
        return (*undone, *added, *scaled)

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

    def _scaled(self, x: torch.Tensor, first: int, *, undo: bool = False, offsets: bool = True) -> torch.Tensor:
        """Adapters' vectors applied to elements from `first` on of each head's outputs; a copy if there are any."""
        if not self._segments.vectors:
            return x
        tokens, heads, elems = x.shape
        outputs = x.new_zeros(tokens, heads, self._width // heads)
        outputs[..., first : first + elems] = x
        modules = ((self._module, 0, self._width),)
        rows = outputs.view(tokens, -1)
        scale_outputs(rows, self._arena, self._segments, self._layer, modules, undo=undo, offsets=offsets)
        return outputs[..., first : first + elems]


_Term = Callable[[torch.Tensor, slice], None]


def _scale(outputs: torch.Tensor, columns: slice, *, factors: torch.Tensor, offsets: torch.Tensor) -> None:
    outputs.copy_(outputs.float() * factors[columns] + offsets[columns])


def _undo(outputs: torch.Tensor, columns: slice, *, factors: torch.Tensor, offsets: torch.Tensor) -> None:
    outputs.copy_((outputs.float() - offsets[columns]) / factors[columns])


def _add(outputs: torch.Tensor, columns: slice, *, h: torch.Tensor, b: torch.Tensor) -> None:
    outputs.addmm_(h, b[:, columns])
