"""Workloads for profilers: some steps between cudaProfilerStart and cudaProfilerStop, and what they were."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ...memory.pages.layout import MODULES
from ...ops.sgmv import AdapterRows, Segments
from ...ops.sgmv_schedule import decode
from ..bench.context import Context
from ..bench.lora_case import ArenaPages, Launch, LoraCase, layer_bytes, layer_launches, layers_for, num_pages
from ..bench.popularity import segment_lengths
from ..bench.subject import MAX_RANK, Subject

KINDS = ("decode", "sgmv")


@dataclass(frozen=True)
class Recipe:
    """kind: `decode`, whole engine steps, or `sgmv`, a layer's LoRA launches alone. rank 0: the base model.

    graphs: whether decode steps are replayed from graphs.
    """

    kind: str
    rows: int
    rank: int
    popularity: str
    steps: int
    prompt_tokens: int
    graphs: bool


def run(recipe: Recipe, context: Context) -> dict[str, Any]:
    """Run the workload; returns its description: seconds per step, and the SGMV launches of a layer in order."""
    seconds, launches, layers = (_decode if recipe.kind == "decode" else _sgmv)(recipe, context)
    return {
        **asdict(recipe),
        "model": context.size.name,
        "device": context.device,
        "seconds_per_step": seconds,
        "layers": layers,
        "launches": [
            {"kernel": launch.kernel, "group": launch.group, "bytes": launch.cost.bytes, "flops": launch.cost.flops}
            for launch in launches
        ],
    }


def _decode(recipe: Recipe, context: Context) -> tuple[float, list[Launch], int]:
    lengths = segment_lengths(recipe.popularity, recipe.rows)
    adapters = context.adapters(recipe.rank, len(lengths)) if recipe.rank else {}
    names = [name for name, length in zip(adapters, lengths, strict=False) for _ in range(length)]
    with Subject(
        context, adapters, max_seqs=recipe.rows, max_batched=max(recipe.prompt_tokens, 2048),
        max_len=recipe.prompt_tokens + 2 * recipe.rows + recipe.steps + 32,
        graph_capture="lazy" if recipe.graphs else "off",
    ) as subject:  # fmt: skip
        requests = subject.decoding(names or [None] * recipe.rows, recipe.prompt_tokens, recipe.steps + 8)
        seconds = _profiled(context, lambda: subject.step_seconds(recipe.steps, recipe.rows))
        subject.clear(requests)
    return seconds / recipe.steps, _launches(recipe, context, lengths), context.size.geometry.layers


def _launches(recipe: Recipe, context: Context, lengths: list[int]) -> list[Launch]:
    """LoRA launches of one layer of a decode step; none for the base model."""
    if not recipe.rank:
        return []
    segments, begin, offsets = Segments(), 0, [0] * len(MODULES)
    for length in lengths:
        segments.add(begin, begin + length, AdapterRows((), recipe.rank, 1.0, 0, offsets, offsets, (0,)))
        begin += length
    return layer_launches(context.size, segments, decode(recipe.rows, MAX_RANK), context.dtype.itemsize)


def _sgmv(recipe: Recipe, context: Context) -> tuple[float, list[Launch], int]:
    lengths = segment_lengths(recipe.popularity, recipe.rows)
    ranks, itemsize = [recipe.rank or 16] * len(lengths), context.dtype.itemsize
    layers = layers_for(layer_bytes(context.size, ranks, itemsize), context.l2_bytes(), most=8)
    pages = num_pages(context.size, ranks, layers, itemsize)
    arena = ArenaPages(context.size, context.dtype, context.device, pages, context.seed)
    schedule = decode(recipe.rows, MAX_RANK)
    case = LoraCase(context.size, arena, lengths, ranks, layers, schedule, MAX_RANK, context.seed)
    case.run()

    def steps() -> None:
        for _ in range(recipe.steps):
            case.run()

    return _profiled(context, steps) / recipe.steps, case.launches(), layers


def _profiled(context: Context, work: Callable[[], Any]) -> float:
    """Seconds of `work`, seen by profilers."""
    context.timer.synchronize()
    with _capture_range(context.device):
        began = time.perf_counter()
        work()
        context.timer.synchronize()
        return time.perf_counter() - began


@contextmanager
def _capture_range(device: str) -> Iterator[None]:
    """The profilers' range; nothing without a GPU."""
    if device != "cuda":
        yield
        return
    import torch

    from ...core.model.nvtx_spans import span

    torch.cuda.cudart().cudaProfilerStart()
    with span("workload"):
        yield
    torch.cuda.cudart().cudaProfilerStop()
