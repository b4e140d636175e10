"""SGMV at a model's shapes: time of a layer's LoRA work, and its share of the measured bandwidth.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ....ops.lora.sgmv_schedule import Schedule, decode, prefill
from ...report.table import Table, rows_table
from ..context import Context
from ..lora_case import ArenaPages, Group, LoraCase, layer_bytes, layers_for, num_pages
from .attention import WrongValues
from .mixes import POPULARITIES, segment_lengths

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
    grid, itemsize = list(cells(context)), context.dtype.itemsize
    pages = max(
        num_pages(context.size, ranks, _layers(context, ranks, most), itemsize)
        for ranks, most in [(cell.adapter_ranks(), 256) for cell in grid]
        + [([MAX_RANK] * _PREFILL_SEGMENTS, _PREFILL_LAYERS)]
    )
    arena = ArenaPages(context.size, context.dtype, context.device, pages, context.seed)
    found: dict[str, Any] = {"method": context.timer.method, "bandwidth_bytes_per_s": context.bandwidth()}
    found |= {"cells": [], "groups": [], "prefill": []}
    groups_of = context.pick(("mixed",), ("16",), tuple(RANKS))
    for cell in grid:
        with context.row(found, f"sgmv {cell}"):
            case = _case(context, arena, cell.lengths, cell.adapter_ranks(), decode(cell.tokens, MAX_RANK))
            about = {"tokens": cell.tokens, "ranks": cell.ranks, "popularity": cell.popularity}
            found["cells"].append({**about, "error": _checked(context, str(cell), case), **_measure(context, case)})
            if cell.popularity == "distinct" and cell.tokens >= context.pick(3, 1, 1) and cell.ranks in groups_of:
                for group in case.groups:
                    found["groups"].append({**about, "group": group.name, **_measure(context, case, [group])})
    _prefill(context, arena, found)
    return found


def _layers(context: Context, ranks: list[int], most: int) -> int:
    return layers_for(layer_bytes(context.size, ranks, context.dtype.itemsize), context.l2_bytes(), most)


def _case(
    context: Context, arena: ArenaPages, lengths: list[int], ranks: list[int], schedule: Schedule, most: int = 256
) -> LoraCase:
    layers = _layers(context, ranks, most)
    return LoraCase(context.size, arena, lengths, ranks, layers=layers, schedule=schedule, max_rank=MAX_RANK)


def _measure(context: Context, case: LoraCase, groups: list[Group] | None = None) -> dict[str, Any]:
    """Time and share of a case, or of some groups of projections in it."""
    sample = context.timer.time(lambda: case.run(groups))
    seconds, cost = sample.seconds / case.layers, case.cost(groups)
    return {
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
    matmul = context.limits()["matmul"]["flops_per_s"]
    grid = product(
        context.pick((16,), (512, 4096), (256, 512, 1024, 2048, 4096, 8192)),
        context.pick((2,), (1, 8), (1, 4, _PREFILL_SEGMENTS)),
        context.pick((8,), (16, 64), (8, 16, 32, 64)),
    )
    for tokens, segments, rank in grid:
        name = f"prefill of {tokens} tokens, {segments} segments, rank {rank}"
        with context.row(found, f"sgmv {name}"):
            schedule = prefill(tokens, MAX_RANK, context.dtype.itemsize)
            lengths = [tokens // segments] * segments
            case = _case(context, arena, lengths, [rank] * segments, schedule, _PREFILL_LAYERS)
            row = {"tokens": tokens, "segments": segments, "rank": rank, "error": _checked(context, name, case)}
            row |= {name: value for name, value in _measure(context, case).items() if name in ("us", "bytes", "flops")}
            floor = max(row["bytes"] / context.bandwidth(), row["flops"] / matmul) * 1e6
            found["prefill"].append({**row, "floor_us": floor, "share": floor / row["us"]})


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
