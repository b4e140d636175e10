"""Decode steps after long prompts on the native decoder: KV in the model's dtype and in FP8, engines in rotation.

A step is compared with the time in which the machine reads its bytes. `CHORUS_CPU_ISA` names the ISA level.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ....ops.library import native_library
from ...report.table import Table, rows_table
from ..context import Context
from ..subject import Subject
from ..timer import in_turns, ratio
from .levels import rates

ITEMSIZES = {"auto": 0, "fp8": 1}
"""Bytes of an element of KV by `kv_cache_dtype`; 0: those of the model's dtype."""

_CHUNK = 512
"""Tokens of a step that computes prompts."""


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of whole engine steps, the shortest, the rate over KV in the model's dtype, and the time to read a
    step's bytes as a share of the step.
    """
    longest = context.size.geometry.positions * 3 // 4  # the rest is for what is decoded
    cases = context.pick(((2, 24),), ((1, 4096), (8, 2048)), ((1, 16384), (8, 4096)))
    steps, rounds = context.pick((2, 1), (8, 6), (16, 20))
    threads = context.pick(1, torch.get_num_threads(), torch.get_num_threads())
    found: dict[str, Any] = {"level": native_library.level(), "read": 0.0, "rows": []}
    for rows, prompt in ((rows, min(tokens, longest)) for rows, tokens in cases):
        with context.row(found, f"{rows} rows after {prompt} tokens"), ExitStack() as stack:
            decoded = steps * rounds + -(-rows * prompt // _CHUNK)  # some while others' prompts are computed
            size = {"max_seqs": rows, "max_batched": _CHUNK, "max_len": prompt + decoded + rows + 16}
            work = {}
            for name in ITEMSIZES:
                engine = Subject(context, {}, cpu_kernels="native", kv_cache_dtype=name, threads=threads, **size)
                stack.enter_context(engine).decoding([None] * rows, prompt, decoded)
                work[name] = partial(_shortest, engine, steps, rows)
            seconds = in_turns(work, rounds)
            found["read"] = max(found["read"], rates(context, threads)["read"])
            for name, its in seconds.items():
                num_bytes = _step_bytes(context, name, rows, prompt)
                row = {"kv": name, "count": rows, "tokens": prompt, "ms": min(its) * 1e3, "megabytes": num_bytes / 1e6}
                row |= {"share": num_bytes / found["read"] / min(its), "of_plain": min(seconds["auto"]) / min(its)}
                found["rows"].append(row | {"pairs": 1 / ratio(seconds, name, "auto")})
    return found


def _shortest(engine: Subject, steps: int, rows: int) -> float:
    return min(engine.step_seconds(steps, rows))


def _step_bytes(context: Context, name: str, rows: int, tokens: int) -> int:
    """Bytes that a step reads, each once."""
    step = context.size.geometry.step
    return step(context.dtype.itemsize, rows, 1, tokens, kv_itemsize=ITEMSIZES[name])[0]


def tables(values: dict[str, Any]) -> list[Table]:
    columns = (
        "KV: kv | rows: count | tokens before: tokens | ms | MB read: megabytes | share of read limit: share | "
        "rate over auto: of_plain | in pairs: pairs"
    )
    title = f"(l) decode steps after long prompts, level {values['level']}, reading {values['read'] / 1e9:.1f} GB/s"
    return [rows_table(title, columns, values["rows"])]
