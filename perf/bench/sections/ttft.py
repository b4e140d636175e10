"""Time to first token with the adapter on the device, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from ...report.table import Table, rows_table
from ..context import Context
from ..subject import Subject
from ..timer import in_turns

RANKS = (16, 64)


def run(context: Context) -> dict[str, Any]:
    """Milliseconds on an idle engine, and the longest step that running requests see while one with a cold adapter
    joins.
    """
    lengths = context.pick((8,), (128, 512, 2048), (64, 128, 256, 512, 1024, 2048, 4096), cpu=(128,))
    repeats = context.pick(1, 5, 15)
    running = context.pick(1, 8, 32, cpu=7)
    found: dict[str, Any] = {"running": running, "rows": []}
    for rank in RANKS if not context.smoke else (8, 16):
        adapters = context.adapters(rank, 1)
        (name,) = adapters
        longest = max(lengths)
        size = {
            "max_seqs": running + 1,
            "max_batched": longest + running,
            "max_len": longest + context.pick(32, 256, 256),
        }
        case = f"time to first token, rank {rank}"
        engine = Subject(context, adapters, graph_capture="ahead", **size)  # stalls are timed once
        with context.row(found, case), engine as subject:
            subject.load([name])
            for tokens in lengths:
                with context.row(found, f"{case}, {tokens} tokens", subject.abort_all):
                    found["rows"].append(
                        _row(subject, name, rank=rank, tokens=tokens, repeats=repeats, running=running)
                    )
    return found


def _row(subject: Subject, name: str, rank: int, tokens: int, repeats: int, running: int) -> dict[str, Any]:
    """A prefill waits for each layer of an incoming adapter when it reaches the layer."""
    starts = {"warm": lambda name: None, "host": subject.to_host, "disk": subject.to_disk}

    def first_token(prepare: Callable[[str], object]) -> float:
        prepare(name)
        return subject.first_token_seconds(tokens, name)

    subject.first_token_seconds(tokens, name)
    seconds = in_turns({start: partial(first_token, prepare) for start, prepare in starts.items()}, repeats)
    stalls = {start: _stall(subject, running, tokens, starts[start], name) for start in ("warm", "host")}
    warm, cold, disk = map(median, seconds.values())
    return {
        "rank": rank,
        "prompt_tokens": tokens,
        "loading": "stream",
        **{f"{start}_ms": its * 1e3 for start, its in {"warm": warm, "cold": cold, "disk": disk}.items()},
        "cold_over_warm": cold / warm,
        "disk_over_warm": disk / warm,
        "warm_stall_ms": stalls["warm"] * 1e3,
        "cold_stall_ms": stalls["host"] * 1e3,
    }


def _stall(subject: Subject, running: int, tokens: int, prepare: Callable[[str], None], name: str) -> float:
    """Seconds of the longest step that `running` base requests see while one with the adapter joins them."""
    others = subject.decoding([None] * running, 4, 64)
    prepare(name)
    longest = subject.longest_step_until_first_token(tokens, name)
    subject.clear(others)
    return longest


def tables(values: dict[str, Any]) -> list[Table]:
    columns = (
        "rank | prompt: prompt_tokens | warm: warm_ms | cold (host): cold_ms | cold/warm: cold_over_warm | "
        "disk: disk_ms | disk/warm: disk_over_warm | stall warm: warm_stall_ms | stall cold: cold_stall_ms"
    )
    title = f"(e) time to first token, ms; stall: longest step of {values['running']} running requests meanwhile"
    return [rows_table(title, columns, values["rows"])]
