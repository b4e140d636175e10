"""Twice the KV that fits: requests that outgrow the page pool, preempted to host memory or recomputed, in one run.

All requests arrive at once and generate more tokens than admission expects before any has ended, until their KV would
be twice the page pool: some are preempted. Swapping can't reach the rate with room for all: its steps run all
sequences, while less KV takes more steps of fewer sequences, however fast copies are.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from ...report.table import Goal, Table, rows_table
from ..context import Context
from ..subject import Subject

RANK = 16
TIMES = 2.0
"""KV of all requests relative to the page pool."""

SETTINGS = ("swap", "recompute", "auto", "room for all")

LEAST_GAIN = 1.2
"""Goal: tokens/s of swap over recompute, if the engine's own estimate chooses swap."""

LEAST_AUTO = 0.98
"""Goal: tokens/s of auto over the better of the two."""


def run(context: Context) -> dict[str, Any]:
    """Tokens per second until the last request has ended, for each setting in rotation; every second request has the
    adapter.
    """
    requests, prompt, output = context.pick((4, 16, 640), (12, 256, 1024), (12, 256, 1024))
    found: dict[str, Any] = {
        "requests": requests,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "times": TIMES,
        "rows": [],
    }
    rounds: list[dict[str, dict[str, Any]]] = []
    for index in range(context.pick(1, 2, 4)):
        with context.row(found, f"swapping, round {index + 1}"):
            order = SETTINGS if index % 2 else SETTINGS[::-1]
            rounds.append({name: _serve(context, name, requests, prompt, output) for name in order})
            found["rows"] = [_row(name, rounds) for name in SETTINGS]
    return found


def _row(name: str, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    rates = [each[name]["tokens_per_s"] for each in rounds]
    ratios = [each[name]["tokens_per_s"] / each["recompute"]["tokens_per_s"] for each in rounds]
    return {"setting": name, **rounds[-1][name], "tokens_per_s": median(rates), "over_recompute": median(ratios)}


def _serve(context: Context, setting: str, requests: int, prompt: int, output: int) -> dict[str, Any]:
    adapters = context.adapters(RANK, 1)
    (name,) = adapters
    page = context.size.geometry.page_layout(context.dtype.itemsize)
    size = sum(file.stat().st_size for path in adapters.values() for file in path.iterdir())
    kv_pages = page.pages_for_tokens(prompt + output) * requests
    fields: dict[str, Any] = {"preemption": "recompute", "host_cache_bytes": None}
    if setting != "room for all":
        fields |= {"preemption": setting, "num_pages": 2 + size // page.page_bytes + int(kv_pages / TIMES)}
    limits = {"max_seqs": requests, "max_batched": 2048, "max_len": prompt + output + 16}
    with Subject(context, adapters, **limits, **fields) as subject:
        for index in range(requests):
            subject.add(prompt, output, name if index % 2 else None)
        seconds = subject.finish()
        subject.engine.check_integrity()
        stats, costs = subject.engine.stats(), subject.engine.costs
        return {
            "tokens_per_s": stats.num_generated_tokens / seconds,
            "preempted": stats.num_preemptions,
            "swapped": stats.num_swaps_out,
            "bytes_out": stats.swapped_bytes_out,
            "bytes_in": stats.swapped_bytes_in,
            "copies_ms": stats.swapped_bytes_out // page.page_bytes * costs.swapped_page * 1e3,
            "page_copied_s": costs.swapped_page,
            "page_computed_s": costs.prefix_page,
        }


def goals(values: dict[str, Any]) -> list[Goal]:
    by_setting = {row["setting"]: row for row in values["rows"]}
    if not by_setting:
        return []
    swap, auto = (by_setting[name]["over_recompute"] for name in ("swap", "auto"))
    found = [Goal("tokens/s, auto over the better of swap and recompute", auto / max(swap, 1.0), LEAST_AUTO)]
    if by_setting["auto"]["page_copied_s"] < by_setting["auto"]["page_computed_s"]:
        found.append(Goal("tokens/s, swap over recompute", swap, LEAST_GAIN))
    return found


def tables(values: dict[str, Any]) -> list[Table]:
    columns = (
        ": setting | tokens/s: tokens_per_s | of recompute: over_recompute | preempted | swapped out: swapped | "
        "MB out: bytes_out * 1e-6 | MB in: bytes_in * 1e-6 | copies, ms: copies_ms"
    )
    title = f"(m) {values['requests']} requests, {values['times']:g} times the KV that fits"
    return [rows_table(title, columns, values["rows"])]
