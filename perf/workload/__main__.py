"""Describes a workload, and writes its requests.

    python -m chorus.perf.workload SPEC [--set FIELD=VALUE ...] [--write FILE] [--json] [--window SECONDS]

SPEC: a specification (.toml or .json), or requests that were written before (.jsonl).
"""

from __future__ import annotations

import json
import sys
from collections import deque
from contextlib import nullcontext
from pathlib import Path

from ..report.command import parser
from .errors import WorkloadError
from .spec import open_workload
from .summary import Summary, table
from .traces import jsonl


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("spec", type=Path, help="a specification (.toml, .json), or written requests (.jsonl)")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="another value, like popularity.alpha=2")
    add("--write", type=Path, metavar="FILE", help="write the requests as JSON lines")
    add("--json", action="store_true", help="print the summary as JSON")
    add("--window", type=float, default=60.0, help="seconds to count distinct adapters in")
    arguments = command.parse_args(argv)
    if not 0 < arguments.window < float("inf"):
        command.error(f"argument --window: is {arguments.window:g}; give a number of seconds above 0")
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
