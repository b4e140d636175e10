"""Output tokens per second, end to end, for Punica's four popularities and for the base model."""

from __future__ import annotations

from random import Random
from typing import Any

from ...report.table import Table, rows_table
from ...workload.popularity import Uniform, Zipf
from ..context import Context
from ..subject import Subject

RANK = 16

POPULARITIES = ("distinct", "uniform", "zipf-1.5", "identical")
"""Of a batch of requests over adapters (Punica §7)."""


def segment_lengths(popularity: str, requests: int) -> list[int]:
    """Number of `requests` for each adapter, most popular first, distributed like workloads of that name."""
    law = {"uniform": Uniform(kind="uniform"), "zipf-1.5": Zipf(kind="zipf", alpha=1.5)}.get(popularity)
    if law is None:
        return [requests] if popularity == "identical" else [1] * requests
    return law.counts(requests, None).tolist()


def load(context: Context) -> dict[str, int]:
    """Requests that arrive at once, the slots for them, and their tokens."""
    requests, seats = context.pick((4, 2), (64, 64), (256, 64), cpu=(8, 8))
    prompt, output = context.pick((8, 4), (128, 64), (256, 256), cpu=(128, 64))
    return {"requests": requests, "seats": seats, "prompt_tokens": prompt, "output_tokens": output}


def run(context: Context) -> dict[str, Any]:
    """All requests arrive at once. cold: all adapters are only on disk; warm: as many as fit are resident."""
    requests, seats, prompt, output = load(context).values()
    adapters = context.adapters(RANK, requests)
    names = list(adapters)
    found: dict[str, Any] = {**load(context), "rank": RANK, "rows": []}
    size = {"max_seqs": seats, "max_batched": context.pick(64, 8192, 8192), "max_len": prompt + output + 16}
    with Subject(context, adapters, graph_capture="ahead", **size) as subject:  # cold runs come once
        with context.row(found, "end to end, base", subject.abort_all):
            _run(subject, [None] * requests, prompt, output)  # compiles kernels that nothing has launched yet
            seconds = _run(subject, [None] * requests, prompt, output)
            found["base"] = {"seconds": seconds, "tokens_per_s": requests * output / seconds}
        for popularity in POPULARITIES:
            with context.row(found, f"end to end, {popularity}", subject.abort_all):
                lengths = segment_lengths(popularity, requests)
                chosen: list[str | None] = [
                    name for name, length in zip(names, lengths, strict=False) for _ in range(length)
                ]
                Random(context.seed).shuffle(chosen)
                for name in filter(None, set(chosen)):
                    subject.to_disk(name)
                cold = _run(subject, chosen, prompt, output)
                warm = _run(subject, chosen, prompt, output)
                over = found["base"]["seconds"] / warm if "base" in found else None
                found["rows"].append(
                    {
                        "popularity": popularity,
                        "adapters": len(lengths),
                        "cold_tokens_per_s": requests * output / cold,
                        "tokens_per_s": requests * output / warm,
                        "over_base": over,
                    }
                )
    return found


def _run(subject: Subject, adapters: list[str | None], prompt: int, output: int) -> float:
    """Seconds until all requests have ended."""
    for adapter in adapters:
        subject.add(prompt, output, adapter)
    return subject.finish()


def tables(values: dict[str, Any]) -> list[Table]:
    known = {"popularity": "base", "adapters": 0, "over_base": 1.0}
    base = [{**known, **values["base"]}] if "base" in values else []
    tokens, seats = f"{values['prompt_tokens']} + {values['output_tokens']}", f"{values['seats']} at a time"
    title = f"(f) end to end, output tokens/s: {values['requests']} requests of {tokens} tokens, {seats}"
    columns = "popularity | adapters | cold: cold_tokens_per_s | warm: tokens_per_s | warm/base: over_base"
    return [rows_table(f"{title}, r{values['rank']}", columns, [*base, *values["rows"]])]
