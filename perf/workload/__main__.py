"""Describes a workload, and writes its requests.

    python -m chorus.perf.workload SPEC [--set FIELD=VALUE ...] [--write FILE] [--json] [--window SECONDS]

SPEC: a specification (.toml or .json), or requests that were written before (.jsonl).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from contextlib import nullcontext
from pathlib import Path

from .errors import WorkloadError
from .spec import open_workload
from .summary import Summary, table
from .traces import jsonl


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.workload", description=__doc__.split("\n")[0])
    parser.add_argument("spec", type=Path, help="a specification (.toml, .json), or written requests (.jsonl)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="another value, like popularity.alpha=2"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the requests as JSON lines")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--window", type=float, default=60.0, help="seconds to count distinct adapters in (default: 60)"
    )
    arguments = parser.parse_args(argv)
    if not 0 < arguments.window < float("inf"):
        parser.error(f"argument --window: is {arguments.window:g}; give a number of seconds above 0")
    summary = Summary(arguments.window)
    try:
        requests = summary.watch(open_workload(arguments.spec, arguments.set))
        with arguments.write.open("w", encoding="utf-8") if arguments.write else nullcontext() as file:
            jsonl.write(requests, file) if file else deque(requests, maxlen=0)
    except (WorkloadError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    result = summary.result()
    print(json.dumps(result) if arguments.json else table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
