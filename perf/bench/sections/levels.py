"""Engines with the native decoder at each ISA level that the processor supports, in rotation.

Each is compared with the machine's limits at its level: the rate at which its threads read memory, and that of its
products in registers. `--beside NAME=FILE.so` adds another build of the current level (`CHORUS_CPU_ISA` names another
level), to see the cost of a change to a kernel.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ....core.model.read_config import read_model_config
from ....memory.pages import hugepages
from ....ops.library import native_library
from ....ops.library.native_descriptors import ELEMENT_OF
from ...report.table import Table, rows_table
from ..context import RANKS, Context
from ..subject import Subject
from ..timer import in_turns, ratio

#: Case → number of sequences, whether they are prompts, and the ranks of their adapters.
CASES: dict[str, tuple[int, bool, tuple[int, ...]]] = {
    "decode, 1 row": (1, False, ()),
    "decode, 8 rows": (8, False, ()),
    "decode, 8 adapters": (8, False, tuple(rank for rank in RANKS for _ in range(2))),
    "prefill, 8 prompts": (8, True, ()),
}

_PRODUCTS = 4_000_000  # in registers: some milliseconds


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of whole engine steps, the shortest, and the time at the machine's limit as a share of them."""
    config = context.size.write_config(context.work_dir / "levels" / context.size.family, context.dtype_name)
    model, threads = read_model_config(config), context.pick(1, torch.get_num_threads(), torch.get_num_threads())
    prompt, steps, rounds = context.pick((8, 2, 1), (128, 16, 4), (128, 16, 20))
    has_adapters = model.recurrent is None  # the benchmark's adapters are for all layers
    adapters = context.mixed_adapters() if has_adapters else {}
    more = (model.projections.num_weights - context.size.geometry.layer_params) * context.dtype.itemsize
    builds = {name: path for name, path in context.beside.items() if path.suffix == ".so"}
    found: dict[str, Any] = {"prompt_tokens": prompt, "rates": {}, "rows": []}
    size: dict[str, Any] = {"max_seqs": 8, "max_batched": 8 * prompt, "max_len": prompt + steps + 24}
    size |= {"inline_reads": True, "cpu_kernels": "native", "threads": threads}
    with ExitStack() as stack:
        engines: dict[str, Subject] = {}
        for name in (*native_library.levels()[: context.pick(1, None, None)], *builds):
            with _used(name, builds.get(name)):
                engines[name] = stack.enter_context(Subject(context, adapters, **size))
                engines[name].load(list(adapters))
        for case, (rows, is_prefill, ranks) in CASES.items():
            if ranks and not has_adapters:
                continue
            with context.row(found, case):
                for name in engines:  # in rotation with the steps
                    with _used(name, builds.get(name)):
                        now = rates(context, threads)
                    found["rates"][name] = {what: max(now[what], found["rates"].get(name, now)[what]) for what in now}
                chosen: list[str | None] = [*adapters] if ranks else [None] * rows
                step = prefill if is_prefill else decode
                work = {name: partial(step, each, chosen, prompt, steps) for name, each in engines.items()}
                count, before = (prompt, 0) if is_prefill else (1, prompt)
                num_bytes, flops = context.size.geometry.step(context.dtype.itemsize, rows, count, before, ranks)
                num_bytes, flops = num_bytes + more, flops + more // context.dtype.itemsize * 2 * rows * count
                seconds = in_turns(work, rounds)
                for name, its in seconds.items():
                    limit = max(num_bytes / found["rates"][name]["read"], flops / found["rates"][name]["products"])
                    row = {"level": name, "case": case, "ms": min(its) * 1e3, "share": limit / min(its)}
                    found["rows"].append(row | {"over_first": ratio(seconds, name, next(iter(seconds)))})
    return found


def _used(level: str, build: Path | None) -> AbstractContextManager[Any]:
    """In this `with` block, decoders are made at a level, or from another build of the current level."""
    if build is None:
        return patch.dict(os.environ, {native_library.ISA: level})
    library = native_library.opened(build)
    return patch.object(native_library, "library", lambda: library)


def rates(context: Context, threads: int) -> dict[str, float]:
    """Bytes and operations per second, the best of a few."""
    library, num_bytes = native_library.required(), context.pick(1 << 20, 512 << 20, 512 << 20)
    memory = hugepages.zeros((num_bytes,), torch.uint8).fill_(1)
    reads = [library.chorus_read_rate(threads, memory.data_ptr(), num_bytes) for _ in range(context.pick(1, 4, 4))]
    element = ELEMENT_OF[context.dtype]
    products = [library.chorus_gemm_rate(threads, element, _PRODUCTS) for _ in range(context.pick(1, 4, 4))]
    return {"read": max(reads), "products": max(products)}


def decode(engine: Subject, adapters: list[str | None], prompt: int, steps: int) -> float:
    """Seconds of the shortest of some decode steps."""
    return min(engine.decode_seconds(adapters, prompt, steps))


def prefill(engine: Subject, adapters: list[str | None], prompt: int, steps: int) -> float:
    """Seconds until prompts have their first tokens."""
    for adapter in adapters:
        engine.add(prompt, 1, adapter)
    return engine.finish()


def tables(values: dict[str, Any]) -> list[Table]:
    rates = [{"level": level, **its} for level, its in values["rates"].items()]
    columns = "level | case | ms | share of limit: share | time over the first's: over_first"
    limits = "level | read GB/s: read * 1e-9 | products GFLOP/s: products * 1e-9"
    return [
        rows_table("(s) what the machine allows by level", limits, rates),
        rows_table(f"(s) steps of levels, {values['prompt_tokens']} tokens before", columns, values["rows"]),
    ]
