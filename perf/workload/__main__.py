"""Describes a workload, and writes its requests.

    python -m chorus.perf.workload SPEC [--set FIELD=VALUE ...] [--write FILE] [--json] [--window SECONDS]

SPEC: a specification (.toml or .json), or requests that were written before (.jsonl).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from .errors import WorkloadError
from .request import TraceRequest
from .spec import WorkloadSpec
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
        requests, total = _open(arguments.spec, arguments.set)
        watched = _with_bar(summary.watch(requests), total)
        if arguments.write is None:
            deque(watched, maxlen=0)
        else:
            with arguments.write.open("w", encoding="utf-8") as file:
                jsonl.write(watched, file)
    except (WorkloadError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    result = summary.result()
    print(json.dumps(result) if arguments.json else table(result))
    return 0


def _open(path: Path, settings: list[str]) -> tuple[Iterable[TraceRequest], float | None]:
    """The requests, and seconds of arrivals to expect where that is known."""
    if path.suffix == ".jsonl":
        if settings:
            raise WorkloadError(f"--set {settings[0]}: {path} holds requests, not a specification; leave it out")
        return jsonl.read(path), None
    overrides = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise WorkloadError(f"--set {setting}: give FIELD=VALUE, like popularity.alpha=2")
        overrides[name] = value
    spec = WorkloadSpec.load(path, overrides)
    return spec, spec.duration


def _with_bar(requests: Iterable[TraceRequest], seconds: float | None) -> Iterable[TraceRequest]:
    """The same requests, with a bar of the time that they have reached, on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from requests
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("requests", total=seconds)
        for request in requests:
            if request.id % 4096 == 0:
                progress.update(task, completed=request.arrival)
            yield request


if __name__ == "__main__":
    raise SystemExit(main())
