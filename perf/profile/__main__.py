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

from ..bench.context import Context
from ..bench.popularity import POPULARITIES
from ..bench.sizes import SIZES
from ..bench.store import ResultStore
from ..bench.timer import CudaTimer, WallTimer
from ..report.command import conclude, parser
from ..report.table import Table
from . import commands, tables
from . import workload as profile_workload

TOOL_MISSING = 3
_TOP = 20


def main(argv: list[str] | None = None) -> int:
    args, workload = _parse(argv)
    if args.command == "workload":
        return _workload(args)
    args.out.mkdir(parents=True, exist_ok=True)
    description = args.out / f"{args.command}-workload.json"
    workload = [sys.executable, "-m", "chorus.perf.profile", "workload", *workload, "--describe", str(description)]
    try:
        tool, missing = commands.find_tool(args.command, args.tool), None
    except commands.ToolMissing as error:
        tool, missing = args.command, error
    if args.command == "nsys":
        todo = commands.nsys(tool, args.out / "nsys", workload)
    else:
        todo = commands.ncu(tool, args.out / "ncu", workload, args.kernels, args.launches)
    if missing is not None:
        print(f"{missing}\nwith it, this would run:", file=sys.stderr)
        print(*map(shlex.join, todo), sep="\n")
        conclude({"ok": False, "missing": args.command}, ok=False)
        return TOOL_MISSING
    for command in todo:
        print(shlex.join(command), file=sys.stderr)
        if args.dry_run:
            continue
        if code := subprocess.run(command, env={**os.environ, "CHORUS_NVTX": "1"}, check=False).returncode:
            print(f"{args.command} ended with {code}", file=sys.stderr)
            return conclude({"ok": False, "exit": code, "command": command}, ok=False)
    return 0 if args.dry_run else _report(args, json.loads(description.read_text("utf-8")))


def _report(args: argparse.Namespace, description: dict[str, Any]) -> int:
    bandwidth, found = _bandwidth(args.limits), {}
    if args.command == "nsys":
        kernels = tables.trace((args.out / "nsys_cuda_gpu_trace.csv").read_text("utf-8"))
        found |= {"top": tables.top(kernels)[:_TOP], "gaps": tables.graph_gaps(kernels)}
        shown = Table("top kernels", ["kernel", "%", "total µs", "count", "median µs", "least µs"])
        for row in found["top"]:
            shown.add(row["kernel"][:60], 100 * row["share"], *list(row.values())[2:])
        gaps = Table("between graph launches", ["launches", "gaps", "median µs", "largest µs", "busy"])
        gaps.add(*found["gaps"].values())
        shown.show()
        gaps.show()
    else:
        kernels = tables.counters((args.out / "ncu.csv").read_text("utf-8"))
        found["profiled"] = len(kernels)
    if description["launches"]:
        found["sgmv"] = tables.sgmv(kernels, description["launches"], bandwidth)
        _sgmv_table(found["sgmv"], description).show()
    result = args.out / f"{args.command}.json"
    found = {"ok": True, "workload": description, "bandwidth_bytes_per_s": bandwidth, **found}
    result.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return conclude({"ok": True, "result": str(result)}, ok=True)


def _sgmv_table(rows: Sequence[dict[str, Any]], description: dict[str, Any]) -> Table:
    counted = "dram_bytes" in rows[0]
    more = ["DRAM bytes", "DRAM/counted", "% of peak", "registers"] if counted else []
    table = Table(
        f"SGMV launches, rank {description['rank']}, {description['rows']} rows, {description['popularity']}",
        ["kernel", "group", "count", "µs", "MB", "GB/s", "share of limit", *more],
    )
    for row in rows:
        extra = (
            [row["dram_bytes"] / 1e6, row["dram_over_counted"], row["peak_percent"], row["registers"]] if more else []
        )
        table.add(row["kernel"], row["group"], row["count"], row["us"], row["bytes"] / 1e6, row["bytes_per_s"] / 1e9,
                  row["share"], *extra)  # fmt: skip
    return table


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
        args.describe.write_text(json.dumps(description, indent=1), encoding="utf-8")
    return conclude(description, ok=True)


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's arguments, and the arguments of a profiler's workload."""
    command = parser(__spec__, __doc__)
    kinds = command.add_subparsers(dest="command", required=True)
    add = kinds.add_parser("workload").add_argument
    add("--kind", choices=profile_workload.KINDS, default="decode", help="engine steps, or LoRA launches alone")
    add("--rows", type=int, default=32, help="requests of a step")
    add("--rank", type=int, default=16, help="of every adapter; 0: the base model")
    add("--popularity", choices=POPULARITIES, default="distinct")
    add("--steps", type=int, default=20)
    add("--prompt-tokens", type=int, default=256)
    add("--model-size", choices=tuple(SIZES), default="llama-3.1-8b")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the workload itself")
    add("--eager", action="store_true", help="without CUDA graphs")
    add("--work-dir", type=Path, help="where adapters are kept; default: a folder that is removed")
    add("--describe", type=Path, metavar="FILE", help="write what ran as JSON")
    for name in ("nsys", "ncu"):
        add = kinds.add_parser(name, epilog="other options are the workload's").add_argument
        add("--out", type=Path, required=True, help="folder of the result files")
        add("--tool", type=Path, help=f"path of {name}; default: on the PATH")
        add("--limits", type=Path, metavar="FILE", help="limits.json of the GPU benchmark, for shares of bandwidth")
        add("--dry-run", action="store_true", help="print the commands only")
        if name == "ncu":
            add("--kernels", default=commands.SGMV_KERNELS, metavar="REGEX", help="names of kernels to profile")
            add("--launches", type=int, default=64, help="most kernels to profile")
    args, rest = command.parse_known_args(argv)
    if args.command == "workload" and rest:
        command.error(f"unknown options: {' '.join(rest)}")
    return args, [*(["--kind", "sgmv", "--steps", "2"] if args.command == "ncu" else []), *rest]


if __name__ == "__main__":
    sys.exit(main())
