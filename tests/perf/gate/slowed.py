"""Proof that the regression gate does its work, `python -m tests.perf.gate.slowed`: quick suite, honest and slowed.

Takes a baseline here and now, then runs the quick suite ten times as it is, which must pass every time, and once with
each of several parts slowed, which must fail in the metric of that part. Slowed means wrapped from here, in a process
of its own: the function runs, then burns as much processor time again as is asked. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chorus.core.executors.cpu import CpuExecutor
from chorus.core.scheduling.scheduler import Scheduler
from chorus.memory.pages.block_table import BlockTable
from chorus.perf.gate.__main__ import BASELINES, read_result
from chorus.perf.gate.baseline import Baseline, Run, compare
from chorus.perf.gate.cpu_suite import measure
from chorus.perf.gate.suite import Suite
from chorus.perf.report.command import conclude, parser


@dataclass(frozen=True)
class Slowdown:
    """A part made slower. share: added time over the part's time. only: the affected calls, by their arguments.

    metrics: the gate must fail in one of them.
    """

    owner: type
    method: str
    share: float
    metrics: tuple[str, ...]
    only: Callable[..., bool] = lambda *args, **kwargs: True


SLOWDOWNS = {
    "steps with adapters": Slowdown(
        CpuExecutor, "execute", 0.3, ("mixed / base", "one / base"), lambda _, plan: bool(plan.adapters)
    ),
    "every step": Slowdown(CpuExecutor, "execute", 1.0, ("around base step / loop", "around mixed step / loop")),
    "scheduler": Slowdown(Scheduler, "schedule", 1.0, ("schedule / loop",)),
    "block tables": Slowdown(BlockTable, "grow", 6.0, ("memory / loop",)),
}


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--runs", type=int, default=10, help="of the suite as it is")
    add("--baseline-runs", type=int, default=2, help="that make the baseline")
    add("--rounds", type=int, default=9, help="values of each metric in a run")
    add("--slowed", choices=("nothing", *SLOWDOWNS), help=argparse.SUPPRESS)  # this is the process that measures
    args = command.parse_args(argv)
    if args.slowed is None:
        with TemporaryDirectory(prefix="chorus-gate-check-") as name:
            return _check(args, Path(name))
    if args.slowed != "nothing":
        slow(SLOWDOWNS[args.slowed])
    return conclude(measure(args.rounds), ok=True)


def slow(slowdown: Slowdown) -> None:
    """Wrap the method, for the rest of this process."""
    inner = getattr(slowdown.owner, slowdown.method)

    @functools.wraps(inner)
    def slower(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = inner(*args, **kwargs)
        now = time.process_time()
        if slowdown.only(*args, **kwargs):
            until = now + slowdown.share * (now - began)
            while time.process_time() < until:
                pass
        return result

    setattr(slowdown.owner, slowdown.method, slower)


def _check(args: argparse.Namespace, directory: Path) -> int:
    suite = Suite.read(BASELINES / "cpu.toml")
    taken = Run.of(suite, [_run(args, directory) for _ in range(args.baseline_runs)])
    Baseline.write(taken, directory)
    baseline = Baseline.find(taken, directory)
    assert baseline is not None, "it was written just now"
    found: dict[str, Any] = {"honest": [], "slowed": {}}
    for index in range(args.runs):
        worse = _worse(Run.of(suite, [_run(args, directory)]), baseline)
        found["honest"].append(worse)
        print(f"as it is, run {index + 1} of {args.runs}: {_shown(worse)}", flush=True)
    for name, slowdown in SLOWDOWNS.items():
        worse = _worse(Run.of(suite, [_run(args, directory, name)]), baseline)
        found["slowed"][name] = {"worse": worse, "caught": any(metric in worse for metric in slowdown.metrics)}
        print(f"slowed by {slowdown.share:.0%}: {name}: {_shown(worse)}", flush=True)
    trips = sum(bool(worse) for worse in found["honest"])
    missed = [name for name, entry in found["slowed"].items() if not entry["caught"]]
    print(f"{trips} of {args.runs} honest runs tripped; slowed and not caught: {', '.join(missed) or 'none'}")
    ok = not trips and not missed
    return conclude({"ok": ok, "trips": trips, "missed": missed, **found}, ok)


def _run(args: argparse.Namespace, directory: Path, slowed: str = "nothing") -> dict[str, Any]:
    """The quick suite in a process of its own, slowed or not."""
    path = directory / "result.json"
    with path.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", __spec__.name, "--rounds", str(args.rounds), "--slowed", slowed]
        subprocess.run(command, stdout=file, check=True)
    return read_result(str(path))


def _worse(run: Run, baseline: Baseline) -> dict[str, float | None]:
    """Change of each metric that did not pass."""
    verdicts = compare(run, baseline)
    return {verdict.metric.name: verdict.change for verdict in verdicts if not verdict.status.passes}


def _shown(worse: dict[str, float | None]) -> str:
    parts = [name if change is None else f"{name} {change:+.0%}" for name, change in worse.items()]
    return ", ".join(parts) or "passes"


if __name__ == "__main__":
    sys.exit(main())
