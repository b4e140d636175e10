"""Profile decode steps or SGMV with Nsight Systems or Nsight Compute: `python -m chorus.perf.profile nsys|ncu`.

`nsys` shows the top kernels, the gaps between graph launches and the time of every SGMV launch; `ncu` what memory moved
for each of them. Both run `workload` of the same options, which may be run alone. Where a tool is missing, the command
that would run is printed and the exit code is 3. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..gpu.context import Context
from ..gpu.popularity import POPULARITIES
from ..gpu.sizes import SIZES
from ..gpu.store import ResultStore
from ..gpu.table import Table
from ..gpu.timer import CudaTimer, WallTimer
from . import tables as profile_tables
from . import workload as profile_workload
from .commands import SGMV_KERNELS, Ncu, Nsys, ToolMissing, find_tool

TOOL_MISSING = 3
_TOP = 20


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    if args.command == "workload":
        return _workload(args)
    args.out.mkdir(parents=True, exist_ok=True)
    description = args.out / f"{args.command}-workload.json"
    workload = [
        sys.executable,
        "-m",
        "chorus.perf.profile",
        "workload",
        *_workload_argv(args),
        "--describe",
        str(description),
    ]
    try:
        tool = find_tool(args.command, args.tool)
    except ToolMissing as error:
        print(f"{error}\nwith it, this would run:", file=sys.stderr)
        for command in _commands(args, args.command, workload):
            print(shlex.join(command))
        print(json.dumps({"ok": False, "missing": args.command}))
        return TOOL_MISSING
    for command in _commands(args, tool, workload):
        print(shlex.join(command), file=sys.stderr)
        if args.dry_run:
            continue
        code = subprocess.run(command, env={**os.environ, "CHORUS_NVTX": "1"}, check=False).returncode
        if code:
            print(f"{args.command} ended with {code}", file=sys.stderr)
            print(json.dumps({"ok": False, "exit": code, "command": command}))
            return 1
    return 0 if args.dry_run else _report(args, json.loads(description.read_text("utf-8")))


def _commands(args: argparse.Namespace, tool: str, workload: Sequence[str]) -> list[list[str]]:
    base = args.out / args.command
    if args.command == "nsys":
        nsys = Nsys(tool, base)
        return [nsys.profile(workload), nsys.stats()]
    return [Ncu(tool, base, args.kernels, args.launches).profile(workload)]


def _report(args: argparse.Namespace, description: dict[str, Any]) -> int:
    bandwidth = _bandwidth(args.limits)
    base = args.out / args.command
    if args.command == "nsys":
        nsys = Nsys("nsys", base)
        kernels = profile_tables.kernel_trace(nsys.csv("cuda_gpu_trace").read_text("utf-8"))
        found: dict[str, Any] = {
            "top": profile_tables.kernel_sums(nsys.csv("cuda_gpu_kern_sum").read_text("utf-8"))[:_TOP],
            "gaps": profile_tables.graph_gaps(kernels),
        }
        sgmv = profile_tables.sgmv_from_trace
    else:
        kernels = profile_tables.counters(Ncu("ncu", base).csv.read_text("utf-8"))
        found = {"profiled": len(kernels)}
        sgmv = profile_tables.sgmv_from_counters
    if description["launches"]:
        found["sgmv"] = sgmv(kernels, description["launches"], bandwidth)
    for table in _tables(found, description):
        _show(table)
    found = {"ok": True, "workload": description, "bandwidth_bytes_per_s": bandwidth, **found}
    (args.out / f"{args.command}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps({"ok": True, "result": str(args.out / f"{args.command}.json")}))
    return 0


def _tables(found: dict[str, Any], description: dict[str, Any]) -> list[Table]:
    tables = []
    if "top" in found:
        top = Table("top kernels", ["kernel", "%", "total µs", "count", "median µs", "least µs"])
        for row in found["top"]:
            top.add(
                row["kernel"][:60], 100 * row["share"], row["total_us"], row["count"], row["median_us"], row["least_us"]
            )  # fmt: skip
        gaps = Table("between graph launches", ["launches", "gaps", "median µs", "largest µs", "busy"])
        gaps.add(*found["gaps"].values())
        tables += [top, gaps]
    if "sgmv" in found:
        counted = "dram_bytes" in found["sgmv"][0]
        more = ["DRAM MB", "DRAM/counted", "% of peak", "registers"] if counted else []
        sgmv = Table(
            f"SGMV launches, rank {description['rank']}, {description['rows']} rows, {description['popularity']}",
            ["kernel", "group", "count", "µs", "MB", "GB/s", "share of limit", *more],
        )
        for row in found["sgmv"]:
            extra = (
                (row["dram_bytes"] / 1e6, row["dram_over_counted"], row["peak_percent"], row["registers"])
                if counted
                else ()
            )
            sgmv.add(
                row["kernel"], row["group"], row["count"], row["us"], row["bytes"] / 1e6, row["bytes_per_s"] / 1e9,
                row["share"], *extra,
            )  # fmt: skip
        tables.append(sgmv)
    return tables


def _show(table: Table) -> None:
    from rich.console import Console

    console = Console(width=140)
    console.print(table.title, style="bold", highlight=False, markup=False)
    console.print(table.render(), highlight=False)


def _bandwidth(limits: Path | None) -> float | None:
    """Bytes per second that section `limits` of the GPU benchmark measured; None where it is not given."""
    if limits is None:
        return None
    values = json.loads(limits.read_text("utf-8"))["values"]
    return max(values["copy"]["bytes_per_s"], values["read"]["bytes_per_s"])


def _workload(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    timer = CudaTimer() if args.device == "cuda" else WallTimer(1)
    recipe = profile_workload.Recipe(
        args.kind, args.rows, args.rank, args.popularity, args.steps, args.prompt_tokens, not args.eager
    )
    with TemporaryDirectory(prefix="chorus-profile-") as scratch:
        work_dir = args.work_dir or Path(scratch)
        context = Context(args.device, SIZES[args.model_size], True, timer, ResultStore(work_dir, {}), work_dir)
        description = profile_workload.run(recipe, context)
    if args.describe:
        profile_workload.write(description, args.describe)
    print(json.dumps(description))
    return 0


def _workload_argv(args: argparse.Namespace) -> list[str]:
    argv = [
        "--kind", args.kind, "--rows", str(args.rows), "--rank", str(args.rank), "--popularity", args.popularity,
        "--steps", str(args.steps), "--prompt-tokens", str(args.prompt_tokens), "--model-size", args.model_size,
        "--device", args.device,
    ]  # fmt: skip
    argv += ["--eager"] if args.eager else []
    return argv + (["--work-dir", str(args.work_dir)] if args.work_dir else [])


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.profile", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, kind, steps in (("nsys", "decode", 20), ("ncu", "sgmv", 2), ("workload", "decode", 20)):
        add = commands.add_parser(name).add_argument
        add("--kind", choices=profile_workload.KINDS, default=kind, help="engine steps, or LoRA launches alone")
        add("--rows", type=int, default=32, help="requests of a step")
        add("--rank", type=int, default=16, help="of every adapter; 0: the base model")
        add("--popularity", choices=POPULARITIES, default="distinct")
        add("--steps", type=int, default=steps)
        add("--prompt-tokens", type=int, default=256)
        add("--model-size", choices=tuple(SIZES), default="llama-3.1-8b")
        add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the workload itself")
        add("--eager", action="store_true", help="without CUDA graphs")
        add("--work-dir", type=Path, help="where adapters are kept; default: a folder that is removed")
        if name == "workload":
            add("--describe", type=Path, metavar="FILE", help="write what ran as JSON")
            continue
        add("--out", type=Path, required=True, help="folder of the result files")
        add("--tool", type=Path, help=f"path of {name}; default: on the PATH")
        add("--limits", type=Path, metavar="FILE", help="limits.json of the GPU benchmark, for shares of bandwidth")
        add("--dry-run", action="store_true", help="print the commands only")
        if name == "ncu":
            add("--kernels", default=SGMV_KERNELS, metavar="REGEX", help="names of kernels to profile")
            add("--launches", type=int, default=64, help="most kernels to profile")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
