"""Sampling alone, with the torch path's tokens, and in decode steps compared with greedy ones.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from ....core.requests.grammar import Grammar
from ....ops.sampling.sampling import RowSamplingParams, sample, sample_into, sampling_rows, uniform
from ...report.table import Goal, Table, rows_table
from ..context import Context
from ..models.random_model import write_tokenizer
from ..subject import Subject
from ..timer import in_turns, ratio


class Way(NamedTuple):
    """Parameters of a step's sequences."""

    params: Mapping[str, Any]
    least: float = 0.0
    """Least share of the tokens/s of `over` on a CPU."""
    over: str = "greedy"


#: A completion long enough to be measured.
_SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["one", "two"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}

_HOT = {"temperature": 1.0}

#: Sampling parameters of all sequences that GPU kernels support.
CASES = {"temperature": Way(_HOT, 0.95), "top_p": Way({**_HOT, "top_p": 0.9}, 0.85)}

#: Further sampling parameters for a CPU.
MORE = {
    "top_k": Way({**_HOT, "top_k": 50}, 0.85),
    "min_p": Way({**_HOT, "min_p": 0.05}, 0.85),
    "hot top_p": Way({"temperature": 2.0, "top_p": 0.9}),
    "penalties": Way({**_HOT, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}, 0.8),
    "20 logprobs": Way({"logprobs": 20}, 0.8),
    "200 bad words": Way({"bad_words": tuple((token, token + 1) for token in range(300, 500))}),
    "grammar": Way({**_HOT, "grammar": Grammar("json_schema", json.dumps(_SCHEMA))}, 1 / 1.1, "temperature"),
}

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
    size = {"max_seqs": max(buckets), "max_batched": context.pick(64, 8192, 8192)}
    with Subject(context, {}, max_len=context.pick(64, 512, 1024), **size) as subject:
        write_tokenizer(context.size.geometry.vocab, subject.model)  # allowed by a grammar
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
    row_params = [RowSamplingParams(u=uniform(context.seed, row), **CASES[case].params) for row in range(rows)]
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
    """Rates, and each variant's share of its baseline's rate, measured in rotation; mostly greedy is the baseline."""
    rounds, count = context.pick(1, 4, 8, cpu=10), context.pick(2, 12, 40, cpu=16)
    cases = {"greedy": Way({}), **CASES, **(MORE if context.device == "cpu" else {})}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    ratios: dict[str, float] = {}
    for name, way in cases.items():
        if name != "greedy":
            pair = {
                each: partial(_median, context, subject, bucket, count, way=cases[each]) for each in (name, way.over)
            }
            taken = in_turns(pair, rounds)
            ratios[f"{name}_over_{way.over}"] = ratio(taken, way.over, name)
            for each, its in taken.items():
                seconds[each] += its
    return {
        "bucket": bucket,
        **{f"{name}_tokens_per_s": bucket / median(its) for name, its in seconds.items()},
        **ratios,
    }


def _median(context: Context, subject: Subject, bucket: int, count: int, way: Way) -> float:
    """Median seconds of a decode step."""
    return median(subject.decode_seconds([None] * bucket, context.pick(8, 256, 512, cpu=32), count, **way.params))


def goals(values: dict[str, Any]) -> list[Goal]:
    """The least shares on a CPU."""
    return [
        Goal(
            f"tokens/s, {name} / {way.over}", row[f"{name}_over_{way.over}"], way.least, where=f"batch {row['bucket']}"
        )
        for row in values["steps"]
        for name, way in {**CASES, **MORE}.items()
        if way.least
    ]


def tables(values: dict[str, Any]) -> list[Table]:
    draws = "rows: bucket | case | logits | device µs: device_us | draw µs: draw_us | same tokens: same_tokens"
    steps = Table("(k) decode steps that draw", ["rows", "sampling", "tokens/s", "of greedy"])
    for row in values["steps"]:
        steps.add(row["bucket"], "greedy", row["greedy_tokens_per_s"], 1.0)
        for name, way in {**CASES, **MORE}.items():
            if (rate := row.get(f"{name}_tokens_per_s")) is not None:
                label = name if way.over == "greedy" else f"{name}, of {way.over}"
                steps.add(row["bucket"], label, rate, row[f"{name}_over_{way.over}"])
    return [*([rows_table("(k) draws alone, top_p 0.9", draws, values["draws"])] if values["draws"] else []), steps]
