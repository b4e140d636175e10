"""SGMV at a model's shapes: time of a layer's LoRA work, and its share of the measured bandwidth.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....ops.lora.sgmv_schedule import decode, prefill
from ...report.table import Table, rows_table
from ..context import Context
from ..lora_case import ArenaPages, LoraCase, layer_bytes, layers_for, num_pages
from ..popularity import POPULARITIES, segment_lengths
from .attention import WrongValues

#: Ranks of a case's adapters by its name: one rank for all, or these in rotation.
RANKS = {"8": (8,), "16": (16,), "32": (32,), "64": (64,), "mixed": (8, 16, 32, 64)}
MAX_RANK = 64

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SOME_BATCHES = (1, 8, 32, 64, 256)

_PREFILL_SEGMENTS = 16
_PREFILL_LAYERS = 8

#: Largest difference from torch, relative to the largest output.
TOLERANCE = {"bfloat16": 3e-2, "float32": 1e-4}


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of the grid."""

    tokens: int
    ranks: str
    popularity: str

    @property
    def lengths(self) -> list[int]:
        return segment_lengths(self.popularity, self.tokens)

    def adapter_ranks(self) -> list[int]:
        chosen = RANKS[self.ranks]
        return [chosen[index % len(chosen)] for index in range(len(self.lengths))]


def cells(context: Context) -> Iterator[Cell]:
    """A quick run leaves out some batch sizes of the ranks without a goal."""
    for ranks in context.pick(("mixed",), tuple(RANKS), tuple(RANKS)):
        some = context.quick and ranks not in ("16", "mixed")
        batches = context.pick((1, 3), SOME_BATCHES if some else BATCHES, BATCHES)
        for popularity in context.pick(("distinct", "zipf-1.5"), POPULARITIES, POPULARITIES):
            for tokens in batches:
                if tokens > 1 or popularity == "distinct":  # one request is one adapter, whatever the popularity
                    yield Cell(tokens, ranks, popularity)


def run(context: Context) -> dict[str, Any]:
    """Microseconds per layer (all seven projections, and per group of them), and shares."""
    grid = list(cells(context))
    itemsize = context.dtype.itemsize
    pages = max(num_pages(context.size, cell.adapter_ranks(), _layers(context, cell), itemsize) for cell in grid)
    pages = max(pages, num_pages(context.size, [MAX_RANK] * _PREFILL_SEGMENTS, _PREFILL_LAYERS, itemsize))
    arena = ArenaPages(context.size, context.dtype, context.device, pages, context.seed)
    found: dict[str, Any] = {
        "method": context.timer.method,
        "bandwidth_bytes_per_s": context.bandwidth(),
        "cells": [],
        "groups": [],
        "prefill": [],
    }
    for cell in grid:
        with context.row(found, f"sgmv {cell}"):
            case = LoraCase(
                context.size,
                arena,
                lengths=cell.lengths,
                ranks=cell.adapter_ranks(),
                layers=_layers(context, cell),
                schedule=decode(cell.tokens, MAX_RANK),
                max_rank=MAX_RANK,
            )
            found["cells"].append(_measure(context, cell, case))
            if (
                cell.popularity == "distinct"
                and cell.tokens >= context.pick(3, 1, 1)
                and cell.ranks in context.pick(("mixed",), ("16",), tuple(RANKS))
            ):
                found["groups"] += [_measure(context, cell, case, group.name) for group in case.groups]
    _prefill(context, arena, found)
    return found


def _layers(context: Context, cell: Cell) -> int:
    return layers_for(layer_bytes(context.size, cell.adapter_ranks(), context.dtype.itemsize), context.l2_bytes())


def _measure(context: Context, cell: Cell, case: LoraCase, name: str | None = None) -> dict[str, Any]:
    """Time and share of a case, or of one group of projections in it."""
    groups = [group for group in case.groups if name in (None, group.name)]
    row: dict[str, Any] = {"tokens": cell.tokens, "ranks": cell.ranks, "popularity": cell.popularity}
    if name is None:
        row["error"] = _checked(context, str(cell), case)
    else:
        row["group"] = name
    sample = context.timer.time(lambda: case.run(groups))
    seconds, cost = sample.seconds / case.layers, case.cost(groups)
    return row | {
        "adapters": len(case.ranks),
        "layers": case.layers,
        "us": seconds * 1e6,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "bytes_per_s": cost.bytes / seconds,
        "captured": sample.captured,
        "share": cost.bytes / seconds / context.bandwidth(),
    }


def _checked(context: Context, name: str, case: LoraCase) -> float:
    error = case.error()
    if not error <= TOLERANCE[context.dtype_name]:
        raise WrongValues(f"{name}: differs from torch by {error:.1e} of the largest output")
    return error


def _prefill(context: Context, arena: ArenaPages, found: dict[str, Any]) -> None:
    """Long segments on tensor cores: time compared with both floors, bytes and arithmetic."""
    itemsize = context.dtype.itemsize
    matmul = context.limits()["matmul"]["flops_per_s"]
    for tokens in context.pick((16,), (512, 4096), (256, 512, 1024, 2048, 4096, 8192)):
        for segments in context.pick((2,), (1, 8), (1, 4, _PREFILL_SEGMENTS)):
            for rank in context.pick((8,), (16, 64), (8, 16, 32, 64)):
                name = f"prefill of {tokens} tokens, {segments} segments, rank {rank}"
                with context.row(found, f"sgmv {name}"):
                    ranks = [rank] * segments
                    layers = layers_for(layer_bytes(context.size, ranks, itemsize), context.l2_bytes(), _PREFILL_LAYERS)
                    schedule = prefill(tokens, MAX_RANK, itemsize)
                    lengths = [tokens // segments] * segments
                    case = LoraCase(
                        context.size,
                        arena,
                        lengths=lengths,
                        ranks=ranks,
                        layers=layers,
                        schedule=schedule,
                        max_rank=MAX_RANK,
                    )
                    error = _checked(context, name, case)
                    sample, cost = context.timer.time(case.run), case.cost()
                    seconds = sample.seconds / layers
                    floor = max(cost.bytes / context.bandwidth(), cost.flops / matmul)
                    found["prefill"].append(
                        {
                            "tokens": tokens,
                            "segments": segments,
                            "rank": rank,
                            "us": seconds * 1e6,
                            "error": error,
                            "bytes": cost.bytes,
                            "flops": cost.flops,
                            "floor_us": floor * 1e6,
                            "share": floor / seconds,
                        }
                    )


def tables(values: dict[str, Any]) -> list[Table]:
    cells = values["cells"]
    batches = sorted({row["tokens"] for row in cells})
    by_cell = {(row["popularity"], row["ranks"], row["tokens"]): row for row in cells}
    found = []
    for key, unit, scale in (("us", "µs per layer, all projections", 1), ("share", "% of measured bandwidth", 100)):
        found.append(Table(f"(b) SGMV, {unit}, by batch", ["popularity", "rank", *map(str, batches)]))
        for shape in dict.fromkeys((row["popularity"], row["ranks"]) for row in cells):
            rows = (by_cell.get((*shape, tokens)) for tokens in batches)
            found[-1].add(*shape, *(row and scale * row[key] for row in rows))
    groups = "group | rank: ranks | batch: tokens | µs: us | MB: bytes * 1e-6 | %: share * 100"
    prefill = "tokens | segments | rank | µs: us | floor µs: floor_us | % of floor: share * 100"
    by_group = rows_table("(b) SGMV by group, distinct adapters", groups, values["groups"])
    return [*found, by_group, rows_table("(b) SGMV of prefill", prefill, values["prefill"])]
