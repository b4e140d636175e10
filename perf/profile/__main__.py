"""Profile an engine's steps: `python -m chorus.perf.profile --out DIR decode:8:base decode:8:lora prefill:128`.

A load is KIND:SIZE[:MODE]: decode:ROWS (base, lora, ranks or merged), mixed:TOKENS and prefill:TOKENS of a prompt (base
or lora), cold:TOKENS (the adapter comes from host memory). For each it prints kernels and gaps, also those inside of
replayed graphs, by the parts of the step's budget beside the floor of each at the rates measured in the same run.

torch.profiler records by default. `--nsys` records the same steps with Nsight Systems, and `--ncu` what their kernels
read with Nsight Compute; both leave one report per load in DIR. The last line is one JSON object.

Tests: tests/perf/profile/test_main.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory.host.child_python import python_command
from ..bench.environment import describe
from ..bench.models.sizes import SIZES
from ..bench.options import Options, engine_field
from ..report.command import conclude, count, parser, say
from . import nsight
from .trace import STEP, Step, TraceError, read_chrome, read_nsight

if TYPE_CHECKING:
    from ..bench.context import Context
    from .loads import Load

DEFAULT = [f"decode:{rows}:{mode}" for mode in ("base", "lora") for rows in (1, 8, 32, 64)]

#: Kernels that Nsight Compute looks at unless told otherwise: ours, in which something can be changed.
_OURS = "^(multiply_rows|shrink_|expand_|attend_rows|rms_norm_rows|rotate_and_write_heads|gate_and_mul_rows)"


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    args = _parse(given)
    from .loads import Load, UnknownLoad

    try:
        loads = [Load.parse(text) for text in args.loads or DEFAULT]
        if args.only_steps:
            _only_steps(_options(args).context(), loads[0], args.steps)
            return 0
        for tool in ("nsys", "ncu"):
            if getattr(args, tool):
                nsight.need(tool)
    except (UnknownLoad, nsight.MissingTool) as error:
        print(error, file=sys.stderr)
        return 2
    options = _options(args)
    try:
        context = options.context()
    except RuntimeError as error:  # the device is missing
        print(error, file=sys.stderr)
        return 2
    _measure_limits(context, options)
    found = _profile_all(context, loads, args)
    ok = not any("error" in load for load in found.values())
    return conclude({"environment": describe(options.device), "loads": found}, ok)


def _profile_all(context: Context, loads: Sequence[Load], args: argparse.Namespace) -> dict[str, Any]:
    """The summary of each load; one that fails says why, and costs no other."""
    from .loads import opened
    from .summary import summarise, tables

    found: dict[str, Any] = {}
    for load in loads:
        say(f"{load} …")
        try:
            with opened(context, load) as runner:
                floors = runner.floors()
                steps = None if args.nsys else _traced(runner, args.steps, args.out / f"{_slug(load)}.trace.json")
            if steps is None:
                steps = _by_systems(load, args)
            found[str(load)] = summarise(steps, floors)
            for table in tables(str(load), found[str(load)]):
                table.show()
            if args.ncu:
                _by_compute(load, args).show()
        except (RuntimeError, TraceError) as error:
            say(f"{load}: {error}")
            found[str(load)] = {"error": str(error)}
    return found


def _traced(runner: Any, count: int, path: Path) -> list[Step]:
    """Steps that torch.profiler recorded."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as recorded:
        runner.run(count, lambda: record_function(STEP))
    recorded.export_chrome_trace(str(path))
    return read_chrome(path)


def _by_systems(load: Load, args: argparse.Namespace) -> list[Step]:
    """Steps that Nsight Systems recorded in a process of their own."""
    report = args.out / f"{_slug(load)}.nsys-rep"
    _call(nsight.systems_command(report, _again(load, args)))
    return read_nsight(*nsight.systems_tables(report))


def _by_compute(load: Load, args: argparse.Namespace) -> Any:
    report = args.out / f"{_slug(load)}.ncu-rep"
    _call(nsight.compute_command(report, args.kernels, args.launches, _again(load, args)))
    return nsight.compute_table(report)


def _again(load: Load, args: argparse.Namespace) -> list[str]:
    """The command that only runs a load's steps, with spans."""
    command = python_command(str(__package__), str(load), "--only-steps", "--steps", str(args.steps))
    command += ["--out", str(args.out), "--device", args.device]
    command += ["--model-size", args.model_size] if args.model_size else []
    return [*command, *(["--engine", *args.engine] if args.engine else [])]


def _call(command: Sequence[str]) -> None:
    """Run a tool with the spans of steps on. Raises RuntimeError with the end of what it said."""
    done = subprocess.run(command, env={**os.environ, "CHORUS_NVTX": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{Path(command[0]).name} ended with {done.returncode}: {(done.stderr or done.stdout)[-800:]}"
        )


def _only_steps(context: Context, load: Load, count: int) -> None:
    from ...core.model.nvtx_spans import span
    from .loads import opened

    with opened(context, load) as runner:
        runner.run(count, lambda: span(STEP))


def _measure_limits(context: Context, options: Options) -> None:
    """Measure the device's rates: floors are of the same run."""
    from ..bench.sections import limits

    say("limits …")
    values = limits.run(context)
    context.store.write("limits", 0.0, describe(options.device), values=values)


def _options(args: argparse.Namespace) -> Options:
    """The benchmark's options for the same device, model and engine."""
    argv = ["--quick", "--out", str(args.out), "--device", args.device]
    argv += ["--model-size", args.model_size] if args.model_size else []
    return Options.parse([*argv, *(["--engine", *args.engine] if args.engine else [])])


def _slug(load: Load) -> str:
    return str(load).replace(":", "-")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("loads", nargs="*", metavar="LOAD", help=f"default: {' '.join(DEFAULT)}")
    add("--out", type=Path, required=True, help="folder of the traces and reports")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal; operators stand for kernels")
    add("--model-size", choices=tuple(SIZES), help="default: llama-3.1-8b, on a CPU tiny")
    what = "fields of the engine's configuration; loads come before it, or after --"
    add("--engine", type=engine_field, nargs="+", default=[], metavar="NAME=VALUE", help=what)
    add("--steps", type=count, default=20, help="measured steps of each load")
    add("--nsys", action="store_true", help="record with Nsight Systems")
    add("--ncu", action="store_true", help="also measure kernels with Nsight Compute")
    add("--kernels", default=_OURS, metavar="REGEX", help="kernels that Nsight Compute measures")
    add("--launches", type=count, default=64, help="the most launches that Nsight Compute measures")
    add("--only-steps", action="store_true", help=argparse.SUPPRESS)
    args = command.parse_args(argv)
    args.out = args.out.resolve()
    return args


if __name__ == "__main__":
    sys.exit(main())
