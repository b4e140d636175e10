"""Draws: the kernels beside the torch path, alone and in decode steps, beside greedy steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from ....core.model import sampler
from ....ops.sampling import Chances, draw_into, pick, sample, sampling_draws, uniform
from ...report.table import Table
from ..context import Context
from ..subject import Subject
from .registry import rows_table

#: Name → what each row asks for.
CASES: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
}

#: Standard deviations of random logits: as flat as with random weights, and as peaked as a trained model's.
SPREADS = {"flat": 1.3, "peaked": 4.0}


def run(context: Context) -> dict[str, Any]:
    """Microseconds of draws alone, and milliseconds of whole engine steps with draws, beside greedy steps."""
    buckets = context.pick((1, 2), (1, 16, 64), (1, 16, 64, 128, 256))
    found: dict[str, Any] = {
        "method": context.timer.method,
        "timed": "draw: calls with their uploads, back to back; device: the launches alone, captured; torch: the torch "
        "path as it was on GPUs, looking at all logits for top_p. Steps: engine steps by the host clock, medians of "
        "rounds in turn",
        "draws": [],
        "steps": [],
    }
    for bucket in buckets:
        for case in CASES:
            for logits in SPREADS:
                with context.row(found, f"draw, {case}, {logits} logits, {bucket} rows"):
                    found["draws"].append(_draw(context, bucket, case, logits))
    size = {"max_seqs": max(buckets), "max_batched": context.pick(64, 8192, 8192)}
    with Subject(context, {}, max_len=context.pick(64, 512, 1024), **size) as subject:
        for bucket in buckets:
            with context.row(found, f"steps that draw, {bucket} rows", subject.abort_all):
                found["steps"].append(_steps(context, subject, bucket))
    return found


def _draw(context: Context, rows: int, case: str, logits: str) -> dict[str, Any]:
    vocab = context.size.geometry.vocab
    generator = torch.Generator().manual_seed(context.seed)
    on_host = torch.randn(rows, vocab, generator=generator) * SPREADS[logits]
    values = on_host.to(context.device)
    chances = [Chances(u=uniform(context.seed, row), **CASES[case]) for row in range(rows)]
    tokens = torch.zeros(2, rows, dtype=torch.long, device=context.device)
    time = context.timer.time
    seconds = {
        "draw": time(lambda: draw_into(tokens, values, range(rows), chances), capture=False).seconds,
        "torch": time(lambda: sample(values, chances, vocab), capture=False).seconds,
    }
    draw_into(tokens, values, range(rows), chances)
    same = (tokens[0] == sample(values, chances, vocab)).sum().item()
    if not context.smoke:
        from ....ops import sampling_triton  # needs triton

        draws, num_limited = sampling_draws(range(rows), chances, vocab)
        on_device = torch.from_numpy(draws).to(context.device)
        seconds["device"] = time(lambda: sampling_triton.draw(tokens, values, on_device, num_limited)).seconds
    return {
        "bucket": rows, "case": case, "logits": logits, "same_tokens": same,
        **{f"{name}_us": value * 1e6 for name, value in seconds.items()},
    }  # fmt: skip


def _torch_draw(tokens: torch.Tensor, logits: torch.Tensor, rows: Sequence[int], chances: Sequence[Chances]) -> None:
    """`draw_into` by the torch path."""
    drawn = sample(pick(logits, rows), chances, logits.shape[1])
    tokens[:, : len(rows)] = drawn  # all rows of the step draw


def _steps(context: Context, subject: Subject, bucket: int) -> dict[str, Any]:
    rounds, count = context.pick(1, 4, 8), context.pick(2, 12, 40)
    ways = {"greedy": {}, **CASES}
    seconds: dict[str, list[float]] = {
        name: [] for way in ways for name in ((way,) if way == "greedy" else (way, f"{way}_torch"))
    }
    for index in range(rounds):
        for name in sorted(seconds, reverse=bool(index % 2)):
            by_torch = name.endswith("_torch")
            with patch.object(sampler, "draw_into", _torch_draw if by_torch else draw_into):
                seconds[name].append(_median(context, subject, bucket, count, ways[name.removesuffix("_torch")]))
    greedy = seconds["greedy"]
    return {
        "bucket": bucket,
        **{f"{name}_tokens_per_s": bucket / median(its) for name, its in seconds.items()},
        **{
            f"{name}_over_greedy": median(base / own for base, own in zip(greedy, its, strict=True))
            for name, its in seconds.items()
            if name != "greedy"
        },
    }


def _median(context: Context, subject: Subject, bucket: int, count: int, params: dict[str, float]) -> float:
    """Median seconds of a decode step."""
    requests = subject.decoding([None] * bucket, context.pick(8, 256, 512), count, **params)
    try:
        return median(subject.step_seconds(count, bucket))
    finally:
        subject.clear(requests)


def tables(values: dict[str, Any]) -> list[Table]:
    draws = {
        "rows": "bucket", "case": "case", "logits": "logits", "device µs": lambda row: row.get("device_us"),
        "draw µs": "draw_us", "torch µs": "torch_us", "same tokens": "same_tokens",
    }  # fmt: skip
    steps: dict[str, Any] = {"rows": "bucket", "greedy tokens/s": "greedy_tokens_per_s"}
    for case in CASES:
        steps |= {f"{case}/greedy": f"{case}_over_greedy", f"{case} by torch/greedy": f"{case}_torch_over_greedy"}
    return [
        rows_table("(k) draws alone, top_p 0.9", draws, values["draws"]),
        rows_table("(k) tokens/s of decode steps that draw, as a share of greedy ones", steps, values["steps"]),
    ]
