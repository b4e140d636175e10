"""A quick CPU suite for the regression gate: `python -m chorus.perf.gate.cpu_suite`, then `python -m chorus.perf.gate`.

Ratios of processor time, so that neither the machine's speed nor what else it runs decides: steps with LoRA against
steps without, and the engine's own work against a fixed loop that is timed beside it. Every round gives one value of
each, from the fastest of a few tries; the gate estimates the noise from them. What waits instead of working is not seen
here. The last line is one JSON object.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ...ops import native_library
from ..bench.host_time import host_times, prefill_time
from ..contenders.chorus import Contender
from ..cpu import random_model
from ..cpu.allocator import Study
from ..cpu.rounds import processor
from ..cpu.schedule_time import Load, schedule_times
from ..cpu.step_overhead import StepTimer
from ..cpu.workload import Geometry, Job, Workload
from ..report.command import conclude, parser
from ..report.table import Table

#: Large enough that a step is mostly matrix products, small enough for a runner of two processors.
WORKLOAD = Workload(
    Geometry(hidden=512, ffn=1536, layers=4, heads=8, kv_heads=2, vocab=4096, positions=512),
    requests=8, prompt_tokens=32, output_tokens=24, threads=1,
)  # fmt: skip

_LOAD = Load(running=64, waiting=200, adapters=200)
_POOL_PAGES, _POOL_ADAPTERS, _POOL_CYCLES = 1024, 40, 150
_GPU_ROWS, _GPU_TOKENS, _GPU_STEPS, _GPU_PROMPT = 32, 32, 40, 64
_LOOP = 20_000
_GEMMS = 40
_TRIES = 3

#: Stages of a step that are not the model's.
_AROUND = ("schedule", "prepare", "draw", "update", "other")


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
    """The result that the gate's suite `cpu` is about; needs Triton."""
    began = time.perf_counter()
    with TemporaryDirectory(prefix="chorus-gate-") as directory:
        model = random_model.checkpoint(WORKLOAD, Path(directory))
        adapters = {name: str(path) for name, path in random_model.adapters(WORKLOAD, Path(directory)).items()}
        contender = Contender()
        contender.open(Job(WORKLOAD, str(model), adapters, True, {}).to_json())
        try:
            _round(contender, Path(directory))  # the first is slower: caches are cold and nothing is compiled
            found = [_round(contender, Path(directory)) for _ in range(rounds)]
        finally:
            contender.close()
    return {
        "suite": "cpu",
        "device": processor(),
        "kernels": native_library.level() or "torch",
        "rounds": rounds,
        "repeats": {name: [values[name] for values in found] for name in found[0]},
        "seconds": time.perf_counter() - began,
    }


def _round(contender: Contender, work_dir: Path) -> dict[str, float]:
    """One value of each metric."""
    base, mixed = _stages(contender, "base"), _stages(contender, "mixed")
    loop = _fastest(_loop)
    return {
        "mixed / base": _ratio(contender, "mixed", "base"),
        "one / base": _ratio(contender, "one", "base"),
        "base step / gemm": base["forward"] * 1e-6 / _fastest(_gemm),
        "around base step / loop": sum(base[stage] for stage in _AROUND) * 1e-6 / loop,
        "around mixed step / loop": sum(mixed[stage] for stage in _AROUND) * 1e-6 / loop,
        "schedule / loop": schedule_times(_LOAD, 8, time.process_time, min)["slowest"] / loop,
        "memory / loop": _fastest(_memory) / loop,
        **{f"{name} / loop": seconds / loop for name, seconds in gpu_host_seconds(work_dir).items()},
    }


def gpu_host_seconds(work_dir: Path) -> dict[str, float]:
    """Processor time of what the host does in a decode step on a GPU, and in a layer of a prefill with an adapter."""
    cases = {"GPU base step": False, "GPU LoRA step": True}
    found = {
        name: host_times(_GPU_ROWS, _GPU_TOKENS, lora, _GPU_STEPS, work_dir, time.process_time)["execute"] * 1e-6
        for name, lora in cases.items()
    }
    layer = prefill_time(_GPU_PROMPT, 0, True, _GPU_STEPS, work_dir, time.process_time)
    return {**found, "GPU prefill layer": layer * 1e-6}


def _stages(contender: Contender, case: str) -> dict[str, float]:
    """Microseconds of processor time per stage of a decode step."""
    with StepTimer(contender.engine, time.process_time) as timer:
        contender.run(case)
    return timer.summary(WORKLOAD.requests, min)


def _ratio(contender: Contender, case: str, other: str) -> float:
    """Processor time of `case` over that of `other`, in the order A B B A: what drifts slowly cancels out."""
    seconds = [_seconds(lambda name=name: contender.run(name)) for name in (case, other, other, case)]
    return min(seconds[0], seconds[3]) / min(seconds[1], seconds[2])


def _fastest(work: Callable[[], Any]) -> float:
    return min(_seconds(work) for _ in range(_TRIES))


def _seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


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
    """Products of a step's shape, by torch."""
    import torch

    shape = WORKLOAD.geometry
    weight = torch.ones(shape.ffn, shape.hidden, dtype=getattr(torch, WORKLOAD.dtype))
    rows = torch.ones(WORKLOAD.requests, shape.hidden, dtype=weight.dtype)
    for _ in range(_GEMMS):
        torch.nn.functional.linear(rows, weight)


def _memory() -> None:
    """Page pool, adapter store, eviction and block tables under load."""
    Study(_POOL_PAGES, _POOL_ADAPTERS, seed=0).run(_POOL_CYCLES, occupancy=0.9)


if __name__ == "__main__":
    sys.exit(main())
