"""Decode steps with an adapter in the weights, beside the base model's and unmerged ones, in turns in one process.

    python -m chorus.perf.cpu.merged

Eight requests decode at once. base: none has an adapter. one: all have the same, of the mean rank; merged: it is in the
weights. mixture: it is, and one of the eight has another adapter, or none. The same requests are run unmerged, too. A
ratio is the median over rounds of the medians of their steps. Then every adapter is merged beside eight decoding
requests: seconds that it took in all, and the longest that a step had to wait for it.
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

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from . import random_model
from .workload import Geometry, Workload

#: name → (whether merged, adapters of the eight requests in the order of `names`: "m" the merged one, "o" another)
VARIANTS = {
    "base": (False, "--------"),
    "one": (False, "mmmmmmmm"),
    "one, merged": (True, "mmmmmmmm"),
    "mixture": (False, "mmmmmmmo"),
    "mixture, merged": (True, "mmmmmmmo"),
    "with base": (False, "mmmmmmm-"),
    "with base, merged": (True, "mmmmmmm-"),
}
_PROMPT_TOKENS = 128


class Bench:
    """An engine with the workload's adapters, all of them resident."""

    def __init__(self, workload: Workload, directory: Path, mode_policy: str = "manual") -> None:
        model = random_model.checkpoint(workload, directory)
        adapters = random_model.adapters(workload, directory)
        shape, names = workload.geometry, list(adapters)
        shadow, lora = shape.layer_params, sum(map(workload.adapter_params, range(len(names))))
        kv = workload.requests * shape.positions * shape.kv_elems_per_token
        self.engine = Engine.from_config(
            EngineConfig(
                model=model, max_num_seqs=workload.requests, prefix_cache=False, threads=workload.threads, seed=0,
                memory_bytes=2 * workload.itemsize * (shadow + lora + kv), mode_policy=mode_policy,
            )
        )  # fmt: skip
        self.engine.executor.arena.pages.zero_()  # the system gives memory when it is first written: not while measured
        self._workload = workload
        self._serial = 0
        self.names = names
        for name, path in adapters.items():
            self.engine.store.register(name, path)
            self.add(name, 1)
            self.finish()
        self.merged = names[workload.one_adapter]
        self.other = next(name for name in names if name != self.merged)

    def add(self, adapter: str | None, tokens: int) -> None:
        self._serial += 1
        prompt = self._workload.prompts()[0][:_PROMPT_TOKENS]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.add_request(Request(f"r{self._serial}", prompt, params, adapter))

    def finish(self) -> None:
        while self.engine.has_work():
            self.engine.step()

    def decoding(self, kinds: str, tokens: int) -> None:
        """Add a request for each of `kinds` and have all of them decode."""
        before = self.engine.stats().num_generated_tokens
        for kind in kinds:
            self.add({"m": self.merged, "o": self.other}.get(kind), tokens)
        while self.engine.stats().num_generated_tokens < before + 2 * len(kinds):
            self.engine.step()

    def run(self, variant: str, steps: int) -> float:
        """Median seconds of a decode step."""
        merged, kinds = VARIANTS[variant]
        self.set_mode(self.merged if merged else None)
        self.decoding(kinds, steps + 4)
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - began)
        assert (self.engine.stats().merged_adapter is not None) == merged
        self.finish()
        return statistics.median(times)

    def set_mode(self, adapter: str | None) -> None:
        """Have an adapter merged, or none; steps of the base model go on until it is."""
        if adapter is None:
            self.engine.unmerge()
            return
        self.engine.merge(adapter)
        if self.engine.merging.is_under_way:
            self.add(None, 1000)
            while self.engine.merging.is_under_way:
                self.engine.step()
            self.engine.abort(f"r{self._serial}")

    def merge_beside_steps(self, adapter: str) -> dict[str, float]:
        """Seconds that merging takes in all, the longest that one step waits for it, and a step's own, the median."""
        self.engine.unmerge()
        self.engine.reclaim_idle()
        self.add(adapter, 1)
        self.finish()
        self.decoding("--------", 600)
        alone = []
        for _ in range(20):
            began = time.perf_counter()
            self.engine.step()
            alone.append(time.perf_counter() - began)
        self.engine.merge(adapter)
        merging, steps = self.engine.merging, 0
        merging.longest_pause = 0.0
        while merging.is_under_way:
            self.engine.step()
            steps += 1
        for index in range(8):
            self.engine.abort(f"r{self._serial - index}")
        return {
            "seconds": merging.merge_seconds, "steps": steps, "pause": merging.longest_pause,
            "step": statistics.median(alone),
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.cpu.merged", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="decode steps of each variant in a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--geometry", type=Geometry.parse, default=Geometry(), help="as of perf.cpu")
    args = parser.parse_args(argv)
    workload = Workload(args.geometry, dtype=args.dtype, threads=args.threads, ranks=(8, 16, 32, 64))
    with tempfile.TemporaryDirectory(prefix="chorus-merged-") as directory:
        bench = Bench(workload, Path(directory))
        rounds: list[dict[str, float]] = []
        for index in range(args.rounds + 1):
            order = list(VARIANTS) if index % 2 else list(VARIANTS)[::-1]
            rounds.append({name: bench.run(name, args.steps) for name in order})
        del rounds[0]
        merges = {name: bench.merge_beside_steps(name) for name in bench.names}
        bench.engine.close()
    found = {}
    print(f"{'8 requests decode':22}{'ms/step':>9}{'tokens/s':>10}{'of base':>9}")
    for name in VARIANTS:
        seconds = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each["base"] / each[name] for each in rounds)
        print(f"{name:22}{seconds * 1e3:9.2f}{workload.requests / seconds:10.0f}{ratio:9.3f}")
        found[name] = {"seconds": seconds, "of_base": ratio}
    print(f"{'merging':22}{'ms in all':>10}{'steps':>7}{'longest ms':>12}{'a step, ms':>12}")
    for name, it in merges.items():
        milliseconds = {key: it[key] * 1e3 for key in ("seconds", "pause", "step")}
        print(f"{name:22}{milliseconds['seconds']:10.1f}{it['steps']:7.0f}{milliseconds['pause']:12.2f}", end="")
        print(f"{milliseconds['step']:12.2f}")
    print(json.dumps({"merged": {"steps": found, "merging": merges}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
