"""Decode steps with an adapter in the weights, beside the base model's and unmerged ones, in turns in one process.

    python -m chorus.perf.cpu.merged

Eight requests decode at once. base: none has an adapter. one: all have the same, of the mean rank; merged: it is in the
weights. mixture: it is, and one of the eight has another adapter, or none. The same requests are run unmerged, too. A
ratio is the median over rounds of the medians of their steps. Then every adapter is merged beside eight decoding
requests: seconds that it took in all, and the longest that a step had to wait for it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from ..report.command import parser
from .decoding import Decoding, add_options, workload_of
from .workload import Workload

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


class Bench(Decoding):
    """All of the workload's adapters are resident, and there is room for shadow weights."""

    def __init__(self, workload: Workload, directory: Path, mode_policy: str = "manual") -> None:
        super().__init__(workload, directory, more_params=workload.geometry.layer_params, mode_policy=mode_policy)
        self.engine.executor.arena.pages.zero_()  # the system gives memory when it is first written: not while measured
        for name in self.names:
            self.add(name, 1)
            self.finish()
        self.merged = self.names[workload.one_adapter]
        self.other = next(name for name in self.names if name != self.merged)

    def run(self, variant: str, steps: int) -> float:
        """Median seconds of a decode step."""
        merged, kinds = VARIANTS[variant]
        self.set_mode(self.merged if merged else None)
        self.begin([{"m": self.merged, "o": self.other}.get(kind) for kind in kinds], steps + 5)
        seconds = self.step_seconds(steps)
        assert (self.engine.stats().merged_adapter is not None) == merged
        self.finish()
        return seconds

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
            self.engine.abort(f"r{self.serial}")

    def merge_beside_steps(self, adapter: str) -> dict[str, float]:
        """Seconds that merging takes in all, the longest that one step waits for it, and a step's own, the median."""
        self.engine.unmerge()
        self.engine.reclaim_idle()
        self.add(adapter, 1)
        self.finish()
        self.begin([None] * 8, 600)
        alone = self.step_seconds(20)
        self.engine.merge(adapter)
        merging, steps = self.engine.merging, 0
        merging.longest_pause = 0.0
        while merging.is_under_way:
            self.engine.step()
            steps += 1
        for index in range(8):
            self.engine.abort(f"r{self.serial - index}")
        return {
            "seconds": merging.merge_seconds, "steps": steps, "pause": merging.longest_pause,
            "step": alone,
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--steps", type=int, default=40, help="decode steps of each variant in a round")
    add_options(command)
    args = command.parse_args(argv)
    workload = workload_of(args)
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
