"""Decode steps of several TP ranks of one thread each, compared with one rank with as many threads, in rotation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch

from ...report.table import Table, rows_table
from ..context import RANKS, Context
from ..subject import Subject
from ..timer import in_turns, ratio

_ROWS = 8


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of a step of eight sequences; the ratio is the median over rounds of one rank's time over the
    ranks'.
    """
    count = context.pick(1, torch.get_num_threads(), torch.get_num_threads())
    rounds, steps, prompt = context.pick(1, 7, 15), context.pick(3, 40, 40), context.pick(8, 128, 128)
    adapters = context.mixed_adapters(1)
    names: list[str | None] = [*adapters] * (_ROWS // len(RANKS))
    found: dict[str, Any] = {"ranks": count, "timed": "engine steps by the host clock, medians", "rows": []}
    limits = {"max_seqs": _ROWS, "max_batched": 2048, "max_len": prompt + steps + 64, "threads": count}
    with ExitStack() as stack:
        engines = {
            size: stack.enter_context(
                Subject(context, adapters, inline_reads=True, tensor_parallel_size=size, **limits)
            )
            for size in {1, count}
        }
        for mix, chosen in (("base", [None] * _ROWS), ("adapters", names)):
            with context.row(found, f"ranks, {mix}"):
                work = {
                    name: partial(_median, engines[size], chosen, prompt, steps)
                    for name, size in (("one", 1), ("ranks", count))
                }
                in_turns(work, 1)  # warms up
                taken = in_turns(work, rounds)
                found["rows"].append(
                    {
                        "mix": mix,
                        **{f"{name}_ms": median(its) * 1e3 for name, its in taken.items()},
                        "ratio": ratio(taken, "one", "ranks"),
                    }
                )
    return found


def _median(engine: Subject, adapters: Sequence[str | None], prompt: int, steps: int) -> float:
    return median(engine.decode_seconds(adapters, prompt, steps))


def tables(values: dict[str, Any]) -> list[Table]:
    columns = f"rows: mix | 1 rank, ms: one_ms | {values['ranks']} ranks, ms: ranks_ms | ratio"
    return [rows_table("(o) a decode step of eight rows by ranks of one thread each", columns, values["rows"])]
