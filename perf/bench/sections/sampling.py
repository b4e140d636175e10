"""Sampling alone, with the torch path's tokens, and in decode steps compared with greedy ones.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from ....ops.sampling.sampling import RowSamplingParams, sample, sample_into, sampling_rows, uniform
from ...report.table import Table, rows_table
from ..context import Context
from ..subject import Subject
from ..timer import in_turns, ratio

#: Sampling parameters of all sequences.
CASES: dict[str, dict[str, Any]] = {"temperature": {"temperature": 1.0}, "top_p": {"temperature": 1.0, "top_p": 0.9}}

#: Standard deviations of random logits: flat like those of random weights, and peaked like a trained model's.
SPREADS = {"flat": 1.3, "peaked": 4.0}


def run(context: Context) -> dict[str, Any]:
    """Microseconds of sampling alone, and rates of whole engine steps with sampling, compared with greedy steps."""
    buckets = context.pick((1, 2), (1, 16, 64), (1, 16, 64, 128, 256), cpu=(8,))
    found: dict[str, Any] = {"method": context.timer.method, "draws": [], "steps": []}
    for bucket in buckets if _draws_alone(context) else ():
        for case in CASES:
            for logits in SPREADS:
                with context.row(found, f"draw, {case}, {logits} logits, {bucket} rows"):
                    found["draws"].append(_draw(context, bucket, case, logits))
    with Subject(context, {}, **context.engine_size(max(buckets))) as subject:
        for bucket in buckets:
            with context.row(found, f"steps that draw, {bucket} rows", subject.abort_all):
                found["steps"].append(_steps(context, subject, bucket))
    return found


def _draws_alone(context: Context) -> bool:
    """True if kernels sample, even if they are interpreted: a CPU samples as part of its steps."""
    return context.smoke or context.device == "cuda"


def _draw(context: Context, rows: int, case: str, logits: str) -> dict[str, Any]:
    vocab = context.size.geometry.vocab
    generator = torch.Generator().manual_seed(context.seed)
    on_host = torch.randn(rows, vocab, generator=generator) * SPREADS[logits]
    values = on_host.to(context.device)
    row_params = [RowSamplingParams(u=uniform(context.seed, row), **CASES[case]) for row in range(rows)]
    tokens = torch.zeros(2, rows, dtype=torch.long, device=context.device)
    time = context.timer.time
    seconds = {"draw": time(lambda: sample_into(tokens, values, range(rows), row_params), capture=False).seconds}
    sample_into(tokens, values, range(rows), row_params)
    same = (tokens[0] == sample(values, row_params, vocab)).sum().item()
    if not context.smoke:
        from ....ops.sampling import sampling_triton  # needs triton

        draws, num_limited = sampling_rows(range(rows), row_params, vocab)
        on_device = torch.from_numpy(draws).to(context.device)
        seconds["device"] = time(lambda: sampling_triton.sample(tokens, values, on_device, num_limited)).seconds
    return {
        "bucket": rows,
        "case": case,
        "logits": logits,
        "same_tokens": same,
        **{f"{name}_us": value * 1e6 for name, value in seconds.items()},
    }


def _steps(context: Context, subject: Subject, bucket: int) -> dict[str, Any]:
    """Rates, and each case's share of the greedy rate, measured in rotation."""
    rounds, count, prompt = context.pick(1, 4, 8, cpu=10), context.pick(2, 12, 40, cpu=16), context.prompt

    def step(params: Mapping[str, float]) -> float:
        return median(subject.decode_seconds([None] * bucket, prompt, count, **params))

    rates: dict[str, float] = {}
    for name, params in CASES.items():
        taken = in_turns({name: partial(step, params), "greedy": partial(step, {})}, rounds)
        rates |= {f"{each}_tokens_per_s": bucket / median(its) for each, its in taken.items()}
        rates[f"{name}_over_greedy"] = ratio(taken, "greedy", name)
    return {"bucket": bucket, **rates}


def tables(values: dict[str, Any]) -> list[Table]:
    draws = "rows: bucket | case | logits | device µs: device_us | draw µs: draw_us | same tokens: same_tokens"
    steps = "rows: bucket | greedy, tokens/s: greedy_tokens_per_s"
    for name in CASES:
        steps += f" | {name}, tokens/s: {name}_tokens_per_s | of greedy: {name}_over_greedy"
    found = [rows_table("(k) decode steps that draw", steps, values["steps"])]
    return [rows_table("(k) draws alone, top_p 0.9", draws, values["draws"]), *found] if values["draws"] else found
