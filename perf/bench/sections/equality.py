"""Captured steps compared with eager ones, for decoding and for prompts: the same tokens, logprobs and KV, bit
for bit.

Tests: tests/perf/bench/test_sections.py, tests/perf/bench/test_sections_interpreted.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ....memory.pages.pool import PagePool
from ...report.command import say
from ...report.table import Table, rows_table
from ..context import Context
from ..subject import Subject

_TOP = 5

#: Most layers of the model: all launch the same kernels, and with fewer the engines start much faster.
_LAYERS = 8


class Differs(ArithmeticError):
    """A captured step computed other bits than an eager one."""


@dataclass
class Trace:
    """Outputs of an engine for a case: per request its tokens, and log-probabilities as exact floats."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)


def run(context: Context) -> dict[str, Any]:
    """Compare all cases. Raises Differs with the first one that has unequal bits.

    The page pool holds the KV of all steps. So equal pools mean that every layer of every step gave equal bits up to
    the last layer's projections, which tokens and log-probabilities cover.
    """
    context = _shallow(context)
    ranks = context.pick((4, 8), (8, 16, 64), (8, 16, 32, 64))
    each = context.pick(2, 8, 16)
    adapters: dict[str, Any] = {}
    for rank in ranks:
        adapters |= context.adapters(rank, each)
    largest = context.pick(4, 24, 64)
    size = {"max_seqs": largest, "max_batched": context.pick(64, 2048, 4096), "max_len": 64}
    found: dict[str, Any] = {"compared": f"tokens, log-probabilities of the {_TOP} likeliest, all KV", "cases": []}
    size |= {"inline_reads": True, "shadow": True}
    for small_gemm in context.pick(("fused",), ("fused", "off"), ("fused", "on", "off")):
        with (
            Subject(context, adapters, graph_capture="ahead", small_gemm=small_gemm, **size) as captured,
            Subject(context, adapters, graph_capture="off", small_gemm=small_gemm, **size) as eager,
        ):
            for subject in (captured, eager):  # the same pages in both
                subject.load(list(adapters))
            for merged in (None, next(iter(adapters))):
                for name, chosen in cases(list(adapters), largest):
                    case = f"{name}, {merged or 'none'} merged, products of few rows: {small_gemm}"
                    say(f"graph against eager: {case}")
                    if merged is not None:
                        for subject in (captured, eager):
                            subject.merge(merged)
                    steps = context.pick(3, 12, 24)
                    one, other = trace(captured, chosen, steps), trace(eager, chosen, steps)
                    _compare(case, one, other)
                    pages = _compare_arenas(case, captured, eager)
                    found["cases"].append(
                        {"case": case, "rows": len(chosen), "steps": steps, "equal": True, "pages": pages}
                    )
                    context.save(found)
            found["startup"] = captured.startup()
    return found


def _shallow(context: Context) -> Context:
    """The same model with fewer layers, in its own directory."""
    geometry = context.size.geometry
    size = replace(context.size, geometry=replace(geometry, layers=min(geometry.layers, _LAYERS)))
    return replace(context, size=size, work_dir=context.work_dir / "equality")


def cases(names: Sequence[str], largest: int) -> list[tuple[str, list[str | None]]]:
    """Fuller and emptier buckets, then other adapters than before, more of them, mixed ranks, some sequences and
    none.
    """
    one, some, last = names[:1], names[::3], names[-largest:]
    found: list[tuple[str, Sequence[str | None]]] = [
        ("base, one row", [None]),
        ("base, padded bucket", [None] * (largest - 1)),
        ("one adapter", list(one)),
        ("one adapter, all rows", list(one) * largest),
        ("mixed ranks, padded bucket", list(some)),
        ("an adapter per row", list(names[:largest])),
        ("other adapters, some rows base", [name if index % 2 else None for index, name in enumerate(last)]),
        ("base again", [None] * 3),
    ]
    return [(name, [*chosen]) for name, chosen in found]


def trace(subject: Subject, adapters: Sequence[str | None], steps: int) -> Trace:
    """Outputs of requests whose second half arrives while the first half decodes: their prompts share a step with
    decoding sequences.
    """
    trace, half = Trace(), (len(adapters) + 1) // 2
    for joining in (adapters[:half], adapters[half:]):
        for name in joining:
            request = subject.add(6, steps, name, logprobs=_TOP)
            trace.tokens[request.id], trace.logprobs[request.id] = [], []
        for _ in range(2):
            _take(subject, trace)
    while subject.engine.has_work():
        _take(subject, trace)
    return trace


def _take(subject: Subject, trace: Trace) -> None:
    """One step, if there is work."""
    if subject.engine.has_work():
        for output in subject.step():
            trace.tokens[output.request_id] += output.token_ids
            trace.logprobs[output.request_id] += [(item.logprob, item.top) for item in output.logprobs]


def _compare(name: str, captured: Trace, eager: Trace) -> None:
    for what in ("tokens", "logprobs"):
        mine, theirs = getattr(captured, what), getattr(eager, what)
        for request, values in mine.items():
            if values != theirs[request]:
                step = next(
                    at for at, pair in enumerate(zip(values, theirs[request], strict=True)) if pair[0] != pair[1]
                )
                raise Differs(f"{name}: {what} of {request} differ from step {step} on")


def _compare_arenas(name: str, captured: Subject, eager: Subject) -> int:
    """Compare all pages except the dummy, which padding entries write, and adapters'; return how many are not empty."""
    mine, theirs = (subject.arena_pages for subject in (captured, eager))
    kind = {4: torch.int32, 2: torch.int16}[mine.itemsize]
    same = (mine.view(kind) == theirs.view(kind)).all(dim=1)
    left_out = [PagePool.DUMMY, *captured.adapter_pages()]
    same[left_out] = True
    if not bool(same.all()):
        wrong = (~same).nonzero().flatten().tolist()
        raise Differs(f"{name}: {len(wrong)} of {len(same)} pages differ, the first is {wrong[0]}")
    used = mine.view(kind).any(dim=1)
    used[left_out] = False
    return int(used.sum())


def tables(values: dict[str, Any]) -> list[Table]:
    start = "seconds | graphs | capture s: capture_seconds | slowest s: slowest_capture_seconds"
    started = [values["startup"]] if "startup" in values else []
    return [
        rows_table(f"(g) captured against eager: {values['compared']}", "case | rows | steps | equal", values["cases"]),
        rows_table("(g) engine start", f"{start} | graphs MB: graph_bytes * 1e-6", started),
    ]
