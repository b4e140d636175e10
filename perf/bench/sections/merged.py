"""Decode steps with a merged adapter, compared with the base model's and unmerged ones; and the cost of merging."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ...report.table import Table, rows_table
from ..context import Context
from ..subject import Subject, Unsettled
from ..timer import in_turns, ratio

RANK = 16

#: Name → the adapters of a step's sequences: "m" is the merged one, "o" another, repeated up to the batch size.
MIXES = {"one adapter": "m", "mixture": "mmmmmmmo", "with base": "mmmmmmm-"}


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of whole engine steps, in rotation: base, the mix unmerged, the mix with its adapter merged."""
    buckets = context.pick((2,), (8, 32, 64), (1, 8, 16, 32, 64), cpu=(8,))
    most = max(buckets)
    found: dict[str, Any] = {"rows": [], "merges": []}
    size = context.engine_size(most)
    adapters: dict[str, Path] = {}
    for rank, count in context.pick({RANK: 2}, {RANK: 3}, {RANK: 3}, cpu={32: 1, 8: 1, 16: 1, 64: 1}).items():
        adapters |= context.adapters(rank, count)
    names = list(adapters)
    found["adapter"] = names[0]
    with Subject(context, adapters, shadow=True, inline_reads=True, **size) as subject:
        subject.load(names)
        for bucket in buckets:
            for mix, kinds in MIXES.items():
                with context.row(found, f"merged, {mix}, {bucket} rows", subject.abort_all):
                    found["rows"].append(_row(context, subject, names, mix=mix, kinds=kinds, bucket=bucket))
        for name in [*names[1:], names[0]] * context.pick(1, 2, 2):  # graphs are captured once
            with context.row(found, f"merging {name}", subject.abort_all):
                found["merges"].append({"adapter": name, **_merge(context, subject, name)})
    return found


def _row(context: Context, subject: Subject, names: list[str], mix: str, kinds: str, bucket: int) -> dict[str, Any]:
    rounds = context.pick(1, 5, 10)
    of = {"m": names[0], "o": names[1], "-": None}
    chosen = [of[kinds[index % len(kinds)]] for index in range(bucket)]
    subject.merge(names[0])

    def steps(variant: str) -> float:
        if variant == "merged":
            subject.merge(names[0])
        else:
            subject.engine.unmerge()
        adapters = [None] * bucket if variant == "base" else chosen
        return median(subject.decode_seconds(adapters, context.prompt, context.pick(3, 16, 50)))

    variants = ("base", "unmerged", "merged")
    seconds = in_turns({variant: partial(steps, variant) for variant in variants}, rounds)
    return {
        "bucket": bucket,
        "mix": mix,
        **{f"{name}_ms": median(its) * 1e3 for name, its in seconds.items()},
        **{f"base_over_{variant}": ratio(seconds, "base", variant) for variant in variants[1:]},
    }


def _merge(context: Context, subject: Subject, name: str) -> dict[str, Any]:
    """Cost of merging during decode steps of the base model: in total, the longest pause, and graphs captured."""
    before, steps = subject.num_captured, 0
    subject.engine.unmerge()
    requests = subject.decoding([None] * 2, context.prompt, context.pick(40, 200, 400))
    subject.engine.merge(name)
    while subject.engine.merging.is_under_way and subject.engine.has_work():
        subject.step()
        steps += 1
    subject.clear(requests)
    stats = subject.engine.stats()
    if stats.merged_adapter != name:
        raise Unsettled(f"adapter {name!r} was not merged within {steps} steps")
    return {
        "steps": steps,
        "ms": stats.merge_seconds * 1e3,
        "longest_pause_ms": stats.longest_merge_pause * 1e3,
        "shadow_pages": stats.num_shadow_pages,
        "captured": subject.num_captured - before,
    }


def tables(values: dict[str, Any]) -> list[Table]:
    steps = (
        "rows: bucket | requests: mix | base: base_ms | unmerged: unmerged_ms | merged: merged_ms | "
        "base/unmerged: base_over_unmerged | base/merged: base_over_merged"
    )
    merges = (
        "adapter | beside steps: steps | ms | longest pause so far, ms: longest_pause_ms | pages: shadow_pages | "
        "graphs captured: captured"
    )
    return [
        rows_table("(p) decode step with an adapter in the weights, ms", steps, values["rows"]),
        rows_table("(p) merging beside steps", merges, values["merges"]),
    ]
