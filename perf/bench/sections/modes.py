"""Throughput with a policy of modes beside the two fixed modes, by skewness, in turns.

Eight clients each send the next request when the last one is answered. A request has one adapter, of rank 32, with the
probability `skew`, else another one or none, all alike often. unmerged: nothing is merged. merged: that one adapter is,
all the time, and the others run beside it. Policy and modes each have an engine and clients of their own, which send
the same requests, and take turns of a few steps, so that all three meet the same machine. The policy keeps what it has
learned.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...report.table import Table
from ..context import Context
from ..subject import Subject
from .registry import rows_table

MODES = ("unmerged", "merged", "policy")
CLIENTS = 8
RANKS = (32, 8, 16, 64)
"""Of the merged adapter, and of the others."""

_TURN_STEPS = 4


class Clients:
    """Clients of an engine, each with a request at any time."""

    def __init__(self, context: Context, subject: Subject, adapters: dict[str, Path], mode: str) -> None:
        self.subject = subject
        self._merged, *others = adapters
        self._others = [None, *others]
        self._lengths = context.pick((8, 2, 6), (128, 24, 72), (128, 24, 72))
        self._source, self._skew = random.Random(), 0.0
        subject.arena_pages.zero_()  # the system gives memory when it is first written: not while measured
        subject.load(list(adapters))
        if mode == "merged":
            subject.merge(self._merged)

    def start(self, skew: float) -> None:
        """Have all ask for the first time; requests that are there are given up."""
        self.subject.abort_all()
        self._source, self._skew = random.Random(0), skew
        for _ in range(CLIENTS):
            self._ask()

    def turn(self) -> tuple[int, float]:
        """Return the tokens of a turn's steps, and their seconds."""
        engine = self.subject.engine
        before, seconds = engine.stats().num_generated_tokens, 0.0
        for _ in range(_TURN_STEPS):
            outputs, took = self.subject.timed_step()
            seconds += took
            for output in outputs:
                if output.finish_reason is not None:
                    self._ask()
        return engine.stats().num_generated_tokens - before, seconds

    def _ask(self) -> None:
        source, (prompt, least, most) = self._source, self._lengths
        adapter = self._merged if source.random() < self._skew else source.choice(self._others)
        self.subject.add(prompt, source.randint(least, most), adapter)


def run(context: Context) -> dict[str, Any]:
    """Tokens/s over all turns of a skew; ratios with the standard error of the mean of the turns' ratios."""
    adapters: dict[str, Path] = {}
    for rank in RANKS:
        adapters |= context.adapters(rank, 1)
    policy = str(context.engine.get("mode_policy", "fastest"))
    found: dict[str, Any] = {"policy": policy, "turns": context.pick(4, 60, 150), "steps": _TURN_STEPS, "rows": []}
    with ExitStack() as stack:
        clients = {}
        for mode in MODES:
            subject = Subject(
                context, adapters, max_seqs=CLIENTS, max_batched=context.pick(64, 2048, 2048),
                max_len=context.pick(64, 512, 512), shadow=True, inline_reads=True,
                mode_policy=policy if mode == "policy" else "manual",
            )  # fmt: skip
            clients[mode] = Clients(context, stack.enter_context(subject), adapters, mode)
        for skew in context.pick((0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)):
            with context.row(found, f"modes, {skew:g} of the requests for one adapter"):
                found["rows"].append(_row(clients, skew, found["turns"]))
        modes = clients["policy"].subject.engine.modes
        if modes is not None and modes.measured_seconds:
            found["wrong_share"] = modes.wrong_seconds / modes.measured_seconds
    return found


def _row(clients: dict[str, Clients], skew: float, count: int) -> dict[str, Any]:
    for each in clients.values():
        each.start(skew)
        each.turn()  # warms up
    merging = clients["policy"].subject.engine.merging
    before, turns = merging.num_merges, {mode: [] for mode in MODES}
    for number in range(count):
        for mode in MODES[:: 1 if number % 2 else -1]:
            turns[mode].append(clients[mode].turn())
    row: dict[str, Any] = {"skew": skew, **{mode: _rate(turns[mode]) for mode in MODES}}
    for mode in MODES[:2]:
        row |= {f"of_{mode}": row["policy"] / row[mode], f"of_{mode}_error": _error(turns["policy"], turns[mode])}
    return {**row, "merges": merging.num_merges - before}


def _rate(turns: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in turns) / sum(seconds for _, seconds in turns)


def _error(turns: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]) -> float:
    ratios = [_rate([turn]) / _rate([other]) for turn, other in zip(turns, others, strict=True)]
    return statistics.stdev(ratios) / math.sqrt(len(ratios))


def tables(values: dict[str, Any]) -> list[Table]:
    columns: dict[str, Any] = {"skew": "skew", **{f"{mode} tokens/s": mode for mode in MODES}}
    for mode in MODES[:2]:
        columns |= {f"of {mode}": f"of_{mode}", f"± {mode}": f"of_{mode}_error"}
    title = f"(l) policy {values['policy']} beside fixed modes, {CLIENTS} clients"
    return [rows_table(title, {**columns, "merges": "merges"}, values["rows"])]
