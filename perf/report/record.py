"""Runs the measurements of README's table, and keeps what they print: `python -m chorus.perf.report.record FOLDER`.

A new folder `cpu-DATE-COMMIT` below FOLDER gets a file for each command that ends well, and FOLDER the page of all runs
that `chorus.perf.report.history` draws. Fails if a command fails, after the others have run. A command that misses a
goal of its own has measured, and counts.

Tests: tests/perf/report/test_record.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ...memory.host.child_python import python_command
from . import history
from .command import parser, say

COMMANDS = {
    "many_adapters": "chorus.perf.bench.many_adapters",
    "invocations": "chorus.perf.bench.invocations --size tiny --prompt 2048",
    "company": "chorus.perf.bench.company --rounds 3",
    "push": "chorus.perf.bench.push --ways directory descriptor",
    "killed_replica": "chorus.perf.serving.killed_replica",
}
"""By the name of the file, with options that fit a night on two cores."""

MISSED = 1
"""Exit status of a command that has measured, and misses a goal."""


def recorded(folder: Path, name: str, command: Sequence[str]) -> bool:
    """Run a command and keep its last line, a JSON object; False if it failed."""
    ended = subprocess.run(python_command(*command), stdout=subprocess.PIPE, text=True, check=False)
    lines = ended.stdout.splitlines()
    try:
        found = json.loads(lines[-1] if lines else "")
    except ValueError:
        found = None
    if ended.returncode not in (0, MISSED) or not isinstance(found, dict):
        print(f"{name}: failed with {ended.returncode}", file=sys.stderr)
        return False
    (folder / f"{name}.json").write_text(json.dumps(found, indent=4), "utf-8")
    return True


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("folder", type=Path, help="of all runs")
    command.add_argument("--commit", required=True, help="what is measured, at least seven digits of its hash")
    command.add_argument("--machine", required=True, help="what it is, and whether it was idle")
    command.add_argument("--only", nargs="+", choices=COMMANDS, default=[*COMMANDS], metavar="NAME")
    args = command.parse_args(argv)
    name = f"cpu-{datetime.now(UTC):%Y-%m-%d}-{args.commit[:8]}"
    if not history.FOLDER.fullmatch(name):
        command.error(f"--commit {args.commit}: give at least seven digits of a commit's hash")
    folder = args.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "about.txt").write_text(f"{args.machine}\n", "utf-8")
    is_whole = True
    for each in args.only:
        say(each)
        is_whole &= recorded(folder, each, COMMANDS[each].split())
    history.main(["--results", str(args.folder)])
    return 0 if is_whole else 2


if __name__ == "__main__":
    sys.exit(main())
