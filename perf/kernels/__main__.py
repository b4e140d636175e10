"""Check the Triton kernels on a machine without a GPU: `python -m chorus.perf.kernels`.

`--interpret` compares values in Triton's interpreter with the reference, or with the torch path of the same function.
`--compile sm_80,sm_90` compiles every variant and fails on a register spill, on too much shared memory, and where loads
are narrow or a matrix instruction is missing.
A process does one of them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from .elementwise_values import run_grid as run_elementwise
from .elementwise_variants import elementwise_variants
from .sgmv_values import run_grid
from .variants import SHARED_LIMIT, KernelVariant, compile_all, variants

_TITLES = (
    "arch",
    "kernel",
    "group",
    "dtype",
    "tokens",
    "rank",
    "regs",
    "spills",
    "shared",
    "matrix",
    "wide",
    "MB",
    "MFLOP",
)
_COLUMNS = "{:6} {:22} {:8} {:5} {:>6} {:>4} {:>4} {:>6} {:>6} {:17} {:>4} {:>8} {:>8}"


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    if find_spec("triton") is None:
        print("triton is not installed: pip install 'chorus[kernels]'", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        return _interpret(args, begin)
    os.environ.pop("TRITON_INTERPRET", None)
    return _compile(args, begin)


def _interpret(args: argparse.Namespace, begin: float) -> int:
    from ...ops.offline_triton import mend_bf16

    mend_bf16()
    rows = run_grid(args.seed, args.cases) + run_elementwise(args.seed, args.cases)
    print(f"{'checked':15} {'dtype':10} {'launches':>8} {'ranks':>6} {'worst':>9} {'seconds':>8}")
    for row in rows:
        print(
            f"{row.schedule:15} {row.dtype:10} {row.launches:8} {len(row.ranks):6} {row.worst:9.1e} {row.seconds:8.1f}"
        )
    failures = [f"{row.schedule} {row.dtype}: {failure}" for row in rows for failure in row.failures]
    _finish(failures)
    values = [{**vars(row), "ranks": sorted(row.ranks)} for row in rows]
    print(json.dumps({"interpret": values, "ok": not failures, "seconds": round(time.perf_counter() - begin, 1)}))
    return 1 if failures else 0


def _compile(args: argparse.Namespace, begin: float) -> int:
    every: list[KernelVariant] = [*variants(), *elementwise_variants()]
    chosen = [variant for variant in every if re.search(args.only, f"{variant.kernel} {variant.group}")]
    lines = compile_all(args.compile, args.workers, chosen)
    print(_COLUMNS.format(*_TITLES))
    for line in lines:
        variant = line.variant
        print(
            _COLUMNS.format(
                line.arch, variant.kernel, variant.group, variant.dtype, variant.tokens, variant.max_rank or "-",
                line.registers, line.spill_bytes, line.shared_bytes, line.matrix or "-", line.wide_loads,
                f"{line.cost.bytes / 1e6:.1f}", f"{line.cost.flops / 1e6:.0f}",
            )
        )  # fmt: skip
    failures = [f"{line.arch} {line.variant}: {problem}" for line in lines for problem in line.problems()]
    _finish(failures)
    compiler = f"triton {version('triton')}"
    result = {"compiler": compiler, "compile": [line.as_dict() for line in lines], "shared_limit": SHARED_LIMIT}
    print(json.dumps({**result, "ok": not failures, "seconds": round(time.perf_counter() - begin, 1)}))
    return 1 if failures else 0


def _finish(failures: Sequence[str]) -> None:
    for failure in failures:
        print(f"FAILED {failure}")


def _archs(text: str) -> list[str]:
    archs = text.split(",")
    for arch in archs:
        if not re.fullmatch(r"sm_\d+", arch):
            raise argparse.ArgumentTypeError(f"{arch} is not like sm_90")
    return archs


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.kernels", description=__doc__.split("\n\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--interpret", action="store_true", help="compare values with the torch implementations")
    what.add_argument("--compile", type=_archs, metavar="ARCHS", help="compile for these, such as sm_80,sm_90")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=8, help="steps per schedule or kernel, and dtype")
    parser.add_argument("--only", default="", metavar="REGEX", help="compile kernels and groups that match")
    parser.add_argument("--workers", type=int, default=min(4, len(os.sched_getaffinity(0))))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
