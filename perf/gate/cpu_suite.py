"""A quick CPU suite for the regression gate: `python -m chorus.perf.gate.cpu_suite`, then `python -m chorus.perf.gate`.

It measures ratios of CPU time, so neither the machine's speed nor its other load decides: steps with LoRA relative to
steps without, and the engine's own work relative to a fixed loop that is timed next to it. Every round gives one value
of each, from the fastest of a few tries; the gate estimates the noise from them. Time spent waiting is not measured.
The last line is one JSON object.

Tests: tests/perf/gate/test_gate.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...ops.library import native_library
from ..bench.allocator import Study
from ..bench.context import on_cpu
from ..bench.host_time import host_times, prefill_time, timed
from ..bench.machine import processor
from ..bench.models.sizes import Geometry, ModelSize
from ..bench.schedule_time import Load, schedule_times
from ..bench.subject import Subject
from ..report.command import conclude, parser
from ..report.table import Table

#: Large enough that a step is mostly GEMMs, small enough for a CI runner with two processors.
GEOMETRY = Geometry(hidden=512, ffn=1536, layers=4, heads=8, kv_heads=2, vocab=4096, positions=512)
_REQUESTS, _PROMPT, _OUTPUT = 8, 32, 24

_LOAD = Load(running=64, waiting=200, adapters=200)
_POOL_PAGES, _POOL_ADAPTERS, _POOL_CYCLES = 1024, 40, 150
_GPU_ROWS, _GPU_TOKENS, _GPU_STEPS, _GPU_PROMPT = 32, 32, 40, 64
_LOOP = 20_000
_GEMMS = 40
_TRIES = 3


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--rounds", type=int, default=9, help="values of each metric")
    args = command.parse_args(argv)
    if find_spec("triton") is None:
        command.error("the GPU's host times need Triton: pip install 'chorus-lora[kernels]'")
    result = measure(args.rounds)
    table = Table(f"processor time on {result['device']}", ["ratio", "median", "min", "max"])
    for name, values in result["repeats"].items():
        table.add(name, median(values), min(values), max(values))
    table.show()
    return conclude(result, ok=True)


def measure(rounds: int) -> dict[str, Any]:
    """The result for the gate's suite `cpu`; needs Triton."""
    began = time.perf_counter()
    with on_cpu(ModelSize("gate", GEOMETRY, {})) as context:
        adapters, directory = context.mixed_adapters(), context.work_dir
        limits: dict[str, Any] = {"max_seqs": _REQUESTS, "max_batched": 1024, "max_len": 2 * (_PROMPT + _OUTPUT)}
        limits["threads"] = 1
        with Subject(context, adapters, inline_reads=True, **limits) as subject:
            subject.load(list(adapters))
            _round(subject, directory)  # the first is slower: caches are cold and nothing is compiled
            found = [_round(subject, directory) for _ in range(rounds)]
    return {
        "device": processor(),
        "kernels": native_library.level() or "torch",
        "rounds": rounds,
        "repeats": {name: [values[name] for values in found] for name in found[0]},
        "seconds": time.perf_counter() - began,
    }


def _round(subject: Subject, work_dir: Path) -> dict[str, float]:
    """One value of each metric."""
    names: list[str | None] = [*subject.engine.store.names()]
    base: list[str | None] = [None] * _REQUESTS
    (forward, around), (_, around_mixed) = _step(subject, base), _step(subject, names)
    loop = _fastest(_loop)
    one = [name for name in names if name is not None and name.startswith("r32")][:1]
    return {
        "mixed / base": _ratio(subject, names, base),
        "one / base": _ratio(subject, one * _REQUESTS, base),
        "base step / gemm": forward / _fastest(_gemm),
        "around base step / loop": around / loop,
        "around mixed step / loop": around_mixed / loop,
        "schedule / loop": schedule_times(_LOAD, 8, time.process_time, min)["slowest"] / loop,
        "memory / loop": _fastest(_memory) / loop,
        **{f"{name} / loop": seconds / loop for name, seconds in gpu_host_seconds(work_dir).items()},
    }


def gpu_host_seconds(work_dir: Path) -> dict[str, float]:
    """CPU time of the host's part of a decode step on a GPU, and of a layer of a prefill with an adapter."""
    cases = {"GPU base step": False, "GPU LoRA step": True}
    found = {
        name: host_times(
            _GPU_ROWS, _GPU_TOKENS, lora=lora, steps=_GPU_STEPS, work_dir=work_dir, clock=time.process_time
        )["execute"]
        * 1e-6
        for name, lora in cases.items()
    }
    layer = prefill_time(_GPU_PROMPT, 0, lora=True, steps=_GPU_STEPS, work_dir=work_dir, clock=time.process_time)
    return {**found, "GPU prefill layer": layer * 1e-6}


def _step(subject: Subject, adapters: list[str | None]) -> tuple[float, float]:
    """CPU seconds of a decode step: within the model's forward pass, and outside it; the least of some steps."""
    requests = subject.decoding(adapters, _PROMPT, _OUTPUT)
    parts = {"step": (subject.engine, "step"), "forward": (subject.executor.decoder, "forward")}
    with timed(parts, time.process_time) as took:
        subject.step_seconds(_OUTPUT, len(adapters))
    subject.clear(requests)
    around = (step - forward for step, forward in zip(took["step"], took["forward"], strict=True))
    return min(took["forward"]), min(around)


def _ratio(subject: Subject, adapters: Sequence[str | None], others: Sequence[str | None]) -> float:
    """CPU time of whole requests relative to that of others, in the order A B B A, which cancels slow drift."""
    seconds = [_answers(subject, each) for each in (adapters, others, others, adapters)]
    return min(seconds[0], seconds[3]) / min(seconds[1], seconds[2])


def _answers(subject: Subject, adapters: Sequence[str | None]) -> float:
    """CPU seconds of one request for each."""
    requests = [subject.request(_PROMPT, _OUTPUT, name) for name in adapters]
    began = time.process_time()
    for request in requests:
        subject.engine.add_request(request)
    subject.finish()
    return time.process_time() - began


def _fastest(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(_TRIES):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def _loop() -> int:
    """Work like the interpreter's in an engine: attributes, dictionaries, lists, calls."""
    table: dict[int, list[int]] = {}
    for index in range(_LOOP):
        row = table.setdefault(index % 97, [])
        row.append(index)
        if len(row) > 16:
            row.clear()
    return sum(map(len, table.values()))


def _gemm() -> None:
    """Matrix products of a step's shape, by torch."""
    weight = torch.ones(GEOMETRY.ffn, GEOMETRY.hidden, dtype=torch.bfloat16)
    rows = torch.ones(_REQUESTS, GEOMETRY.hidden, dtype=weight.dtype)
    for _ in range(_GEMMS):
        torch.nn.functional.linear(rows, weight)


def _memory() -> None:
    """Page pool, adapter store, eviction and block tables under load."""
    Study(_POOL_PAGES, _POOL_ADAPTERS, seed=0).run(_POOL_CYCLES, occupancy=0.9)


if __name__ == "__main__":
    sys.exit(main())
