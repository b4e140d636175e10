"""Decode steps of several ranks of one thread each, beside one rank with as many threads, in turns.

    python -m chorus.perf.cpu.ranks

Eight requests decode at once, of the base model or with adapters. A ratio is the median over rounds of one rank's
median step over the ranks' of the same round: 1 is as fast, less is slower. Beside it the same of processor time, which
other processes disturb less: a thread's share of one rank's over that of the busiest rank, with waiting by spinning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.executors.ranks import RanksExecutor
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from . import random_model
from .workload import Geometry, Workload

_PROMPT_TOKENS = 128


class Bench:
    """An engine of `ranks` ranks with the workload's adapters, all of them resident."""

    def __init__(self, workload: Workload, directory: Path, ranks: int, kernels: Literal["native", "torch"]) -> None:
        adapters = random_model.adapters(workload, directory)
        shape = workload.geometry
        lora = sum(map(workload.adapter_params, range(len(adapters))))
        kv = workload.requests * shape.positions * shape.kv_elems_per_token
        self.engine = Engine.from_config(
            EngineConfig(
                model=random_model.checkpoint(workload, directory), max_num_seqs=workload.requests, prefix_cache=False,
                threads=workload.threads, seed=0, memory_bytes=2 * workload.itemsize * (ranks * lora + kv),
                tensor_parallel_size=ranks, cpu_kernels=kernels, device="cpu",
            )
        )  # fmt: skip
        self._prompt = workload.prompts()[0][:_PROMPT_TOKENS]
        self._serial = 0
        self._threads = workload.threads
        self._others = self.engine.executor.pids if isinstance(self.engine.executor, RanksExecutor) else []
        self.names = [*adapters]
        for name, path in adapters.items():
            self.engine.store.register(name, path)

    def run(self, adapters: list[str | None], steps: int) -> tuple[float, float]:
        """Median seconds of a decode step, and mean seconds of processor time of its busiest rank, a thread's share."""
        before = self.engine.stats().num_generated_tokens
        for adapter in adapters:
            self._serial += 1
            params = SamplingParams(max_tokens=steps + 8, temperature=0.0, ignore_eos=True)
            self.engine.add_request(Request(f"r{self._serial}", self._prompt, params, adapter))
        while self.engine.stats().num_generated_tokens < before + 3 * len(adapters):
            self.engine.step()
        times, used = [], self._used()
        for _ in range(steps):
            began = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - began)
        busiest = max(after - before for before, after in zip(used, self._used(), strict=True))
        while self.engine.has_work():
            self.engine.step()
        return statistics.median(times), busiest / steps / (self._threads // len(used))

    def _used(self) -> list[float]:
        """Seconds of processor time of each rank so far."""
        return [time.process_time(), *(_process_seconds(pid) for pid in self._others)]


def _process_seconds(pid: int) -> float:
    """Processor time of a process, in ticks of the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.cpu.ranks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="decode steps of each engine in a round")
    parser.add_argument("--ranks", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--geometry", type=Geometry.parse, default=Geometry(), help="as of perf.cpu")
    args = parser.parse_args(argv)
    workload = Workload(args.geometry, dtype=args.dtype, threads=args.ranks, ranks=(8, 16, 32, 64))
    rounds: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory(prefix="chorus-ranks-") as directory:
        benches = {size: Bench(workload, Path(directory), size, args.kernels) for size in (1, args.ranks)}
        names = benches[1].names
        mixes = {"base": [None] * workload.requests, "adapters": [names[i % len(names)] for i in range(8)]}
        for index in range(args.rounds + 1):
            order = list(benches) if index % 2 else list(benches)[::-1]
            rounds.append(
                {f"{mix} {size}": benches[size].run(mixes[mix], args.steps) for mix in mixes for size in order}
            )
        for bench in benches.values():
            bench.engine.close()
    del rounds[0]
    found = {}
    print(f"{'8 requests decode':28}{'1 rank, ms':>12}{f'{args.ranks} ranks, ms':>14}{'ratio':>8}   of each round")
    for mix, at in ((mix, at) for mix in mixes for at in range(2)):
        one, several = ([each[f"{mix} {size}"][at] for each in rounds] for size in benches)
        ratios = [a / b for a, b in zip(one, several, strict=True)]
        ratio, label = statistics.median(ratios), f"{mix}, {('time', 'processor time')[at]}"
        print(f"{label:28}{statistics.median(one) * 1e3:12.2f}{statistics.median(several) * 1e3:14.2f}", end="")
        print(f"{ratio:8.3f}  ", *(f"{each:.2f}" for each in sorted(ratios)))
        found[label] = {"one": one, "several": several, "ratio": ratio}
    print(json.dumps({"ranks": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
