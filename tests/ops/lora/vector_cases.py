"""Random steps of segments with vectors, in pages of any size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.lora.vectors import stride_of

LAYERS = 2

#: Outputs of each module, side by side.
WIDTHS = (40, 7, 33)

MODULES = tuple((module, sum(WIDTHS[:module]), width) for module, width in enumerate(WIDTHS))


@dataclass
class Case:
    """Vectors in an arena, and what they are."""

    arena: torch.Tensor
    segments: Segments
    y: torch.Tensor
    found: list[list[list[tuple[torch.Tensor, torch.Tensor] | None]]]
    """Of each segment, layer and module."""

    def want(self, layer: int, *, undo: bool = False) -> torch.Tensor:
        """y with the vectors of a layer, in float32."""
        y = self.y.float().clone()
        for (begin, end, rows), vectors in zip(self.segments, self.found, strict=True):
            for (_, column, width), pair in zip(MODULES, vectors[layer], strict=True):
                if pair is not None and (rows.scale < 0) == undo:
                    scale, offset = pair
                    part = y[begin:end, column : column + width]
                    part.copy_((part - offset) / scale if undo else part * scale + offset)
        return y


def cases(seed: int, count: int, dtype: torch.dtype) -> Iterator[Case]:
    rng = random.Random(seed)
    for index in range(count):
        yield _case(rng, rng.choice((16, 64, 1000 // 8 * 8)), dtype, index)


def _case(rng: random.Random, page_elems: int, dtype: torch.dtype, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    tokens, segments, found = rng.randint(1, 30), Segments(), []
    arena = torch.full((4096 // page_elems * 8 + 2, page_elems), float("nan"), dtype=dtype)
    free = list(range(len(arena)))
    rng.shuffle(free)
    begin = 0
    while begin < tokens:
        end = min(tokens, begin + rng.randint(1, 12))
        if rng.random() < 0.8:
            rows, vectors = _vectors(rng, arena, free, generator)
            segments.add(begin, end, rows)
            found.append(vectors)
        begin = end
    return Case(arena, segments, torch.randn(tokens, sum(WIDTHS), generator=generator).to(dtype), found)


def _vectors(rng, arena, free, generator):
    places, found, elem, values = [], [], 0, {}
    for _ in range(LAYERS):
        own, pairs = [], []
        for width in WIDTHS:
            if rng.random() < 0.3:
                own.append(-1)
                pairs.append(None)
                continue
            stride = stride_of(width, arena.itemsize)
            pair = torch.rand(width, generator=generator) + 0.5, torch.randn(width, generator=generator)
            values |= {elem: pair[0], elem + stride: pair[1]}
            own.append(elem)
            pairs.append(pair)
            elem += 2 * stride
        places.append(own)
        found.append(pairs)
    pages = [free.pop() for _ in range(-(-elem // arena.shape[1]))]
    run = torch.zeros(len(pages) * arena.shape[1], dtype=arena.dtype)
    for at, vector in values.items():
        run[at : at + stride_of(len(vector), arena.itemsize)].view(torch.float32)[: len(vector)] = vector
    arena[pages] = run.view(len(pages), -1)
    without = [-1] * len(WIDTHS)
    firsts = [max(own) for own in places]
    rows = AdapterRows(pages, 0, rng.choice((1.0, -1.0)), 0, without, without, firsts, vectors=places)
    return rows, found
