"""Report the resources of the Triton kernels, without a GPU: `python -m chorus.perf.kernels --compile sm_90,sm_80`.

For the first architecture given it compiles every variant that serving launches; for the others, the widest of the
variants that differ only in sizes. With `--known`, it compiles only variants that are not in the file, identified by
all inputs (source, constants, compiler), and one of each kernel, which must match the file. It fails on a register
spill, on too much shared memory, on narrow loads and on a missing matrix instruction. `loads`: length of the chain of
loads that a load of weights waits for; `bars`: barriers of all warps; `KiB/SM`: memory requested at once by the
programs that fit on a multiprocessor. The last line is one JSON object.

Tests: tests/perf/kernels/test_kernels.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ..report.command import conclude, count, parser
from ..report.table import rows_table
from .variants import SHARED_LIMIT, compile_all, plain_variants, translate_all, variants

_COLUMNS = (
    "arch | kernel | group | dtype | tokens | rank: max_rank | regs: registers | spills: spill_bytes | "
    "shared: shared_bytes | matrix | wide: wide_loads | loads: loads_before | bars: barriers | KiB/SM: kib_in_flight"
)


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--compile", type=_archs, required=True, metavar="ARCHS", help="such as sm_90,sm_80")
    add("--only", type=_pattern, default="", metavar="REGEX", help="take only variants whose 'KERNEL GROUP' matches")
    add("--known", type=Path, metavar="FILE", help="of variants compiled before, which are not compiled again")
    what = "only take the widest variants through Triton's front end, with whichever version is installed"
    add("--translate", action="store_true", help=what)
    add("--keep", action="store_true", help="write all known variants to the file of --known")
    add("--workers", type=count, default=min(4, len(os.sched_getaffinity(0))), help="processes that compile")
    args = command.parse_args(argv)
    if args.keep and args.known is None:
        command.error("--keep needs --known FILE, the file to write")
    if args.translate and args.known:
        command.error("--translate compiles nothing: leave --known out")
    every = [*variants(), *plain_variants()]
    chosen = [variant for variant in every if args.only.search(f"{variant.kernel} {variant.group}")]
    if not chosen:
        command.error(f"--only {args.only.pattern!r} matches no kernel and group, such as 'rms_norm_rows norm'")
    if find_spec("triton") is None:
        print("triton is not installed: pip install 'chorus-lora[kernels]'", file=sys.stderr)
        return 2
    os.environ.pop("TRITON_INTERPRET", None)
    begin = time.perf_counter()
    if args.translate:
        refused = translate_all(args.compile, chosen)
        for arch, variant, why in refused:
            print(f"FAILED {arch} {variant}: {why}")
        print(f"translated by triton {version('triton')} in {time.perf_counter() - begin:.0f} s")
        return int(bool(refused))
    known = json.loads(args.known.read_text("utf-8")) if args.known and args.known.is_file() else {}
    lines = compile_all(args.compile, args.workers, chosen, known)
    if args.keep:
        rows = (f"{json.dumps(key)}: {json.dumps(fields)}" for key, fields in sorted(known.items()))
        args.known.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")
    rows = []
    for line in lines:
        row = line.as_dict()
        row |= {name: row[name] or None for name in ("max_rank", "matrix")}
        row |= {"kib_in_flight": line.bytes_in_flight >> 10, **({} if line.variant.pointer else {"loads_before": None})}
        rows.append(row)
    rows_table("compiled", _COLUMNS, rows).show()
    failures = [f"{line.arch} {line.variant}: {problem}" for line in lines for problem in line.problems()]
    for failure in failures:
        print(f"FAILED {failure}")
    result = {
        "compiler": f"triton {version('triton')}",
        "compile": [line.as_dict() for line in lines],
        "ok": not failures,
        "shared_limit": SHARED_LIMIT,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    return conclude(result, not failures)


def _archs(text: str) -> list[str]:
    archs = text.split(",")
    for arch in archs:
        if not re.fullmatch(r"sm_\d+", arch):
            raise argparse.ArgumentTypeError(f"{arch} is not like sm_90")
    return archs


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
