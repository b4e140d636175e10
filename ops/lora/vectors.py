"""Adapters' vectors: a scale and an offset for each output of a projection, applied after LoRA has been added.

    y[s:e] = scale · y[s:e] + offset        for every segment [s, e) of tokens whose adapter has vectors

They lie in the adapter's pages, in float32. A segment with scale -1 undoes this, before LoRA is added: it takes the
vectors of an adapter off that is merged into the weights.

Tests: tests/ops/lora/test_vectors.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sgmv import AdapterRows, Segments

_BYTES, _ALIGNMENT = 4, 16  # of a value; of a vector in its page


def stride_of(outputs: int, itemsize: int) -> int:
    """Elements from a module's scales to its offsets."""
    return -(-outputs * _BYTES // _ALIGNMENT) * _ALIGNMENT // itemsize


def vectors_of(
    rows: AdapterRows, arena: torch.Tensor, layer: int, module: int, outputs: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales and offsets `[outputs]` float32 of a module, views where they lie in one page; None if it has none."""
    first = -1 if rows.vectors is None else rows.vectors[layer][module]
    if first < 0:
        return None
    second = first + stride_of(outputs, arena.itemsize)
    return _gather(rows, arena, first, outputs), _gather(rows, arena, second, outputs)


def _gather(rows: AdapterRows, arena: torch.Tensor, first: int, outputs: int) -> torch.Tensor:
    pieces, page_elems, left = [], arena.shape[1], outputs * _BYTES // arena.itemsize
    while left:
        index, at = divmod(first, page_elems)
        piece = arena[rows.pages[index], at : min(at + left, page_elems)]
        pieces.append(piece.view(torch.float32))
        first, left = first + len(piece), left - len(piece)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def scale_outputs(
    y: torch.Tensor,
    arena: torch.Tensor,
    segments: Segments,
    layer: int,
    modules: Sequence[tuple[int, int, int]],
    *,
    undo: bool = False,
    offsets: bool = True,
) -> None:
    """Apply the vectors of all segments to y `[tokens, out]`, in place; see `sgmv` for the arguments.

    undo: undo those of the segments with scale -1 instead. offsets: False to scale alone.
    """
    for index in segments.vectors:
        rows, begin, end = segments.rows[index], segments.begin[index], segments.end[index]
        if (rows.scale < 0) != undo:
            continue
        for module, column, width in modules:
            found = vectors_of(rows, arena, layer, module, width)
            if found is not None:
                scale, offset = found[0], found[1] if offsets else 0.0
                part = y[begin:end, column : column + width]
                values = part.float()
                part.copy_((values - offset) / scale if undo else values * scale + offset)
