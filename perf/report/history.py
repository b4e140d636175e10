"""The page of measurements on CPUs, drawn from the files in perf/results: `python -m chorus.perf.report.history`.

Each folder `cpu-DATE-COMMIT` there has one JSON file per command: the last line that the command printed. The page
`perf/results/history.md` has a table per command, and a line for each folder, the newest first. `--check` fails if the
page is stale.

Tests: tests/perf/report/test_history.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .command import parser

RESULTS = Path(__file__).parent.parent / "results"
PAGE = "history.md"
_PERF = str(__package__).rpartition(".")[0]
FOLDER = re.compile(r"cpu-(\d{4}-\d\d-\d\d)-([0-9a-f]{7,})")

Values = Mapping[str, Any]


class Measured(NamedTuple):
    """A command, and the cells of a line of its table."""

    command: str
    """A module, with options."""
    columns: str
    """Divided by ` | `."""
    cells: Callable[[Values], Sequence[str]]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


COMMANDS: dict[str, Measured] = {}
"""By the name of the file."""

Cells = Callable[[Values], Sequence[str]]


def _measured(name: str, command: str, columns: str) -> Callable[[Cells], Cells]:
    """Decorate what makes a command's cells."""

    def note(cells: Cells) -> Cells:
        COMMANDS[name] = Measured(f"{_PERF}.{command}", columns, cells)
        return cells

    return note


@_measured(
    "many_adapters",
    "bench.many_adapters",
    "adapters | start, s | MB | hot p50, ms | cold p50, ms | hot p99, ms | cold p99, ms | errors | beside",
)
def _many(found: Values) -> list[str]:
    hot, cold = found["hot"], found["cold"]
    times = [_ms(each[mark]) for mark in ("p50", "p99") for each in (hot, cold)]
    memory = f"{found['bytes_at_end'] / 1e6:.0f}"
    beside = [
        f"{name}: {_ms(each['hot']['p99'])} and {_ms(each['cold']['p99'])}"
        for name, each in found.get("beside", {}).items()
    ]
    start = f"{found['start_seconds']:.0f}"
    return [f"{found['adapters']:,}", start, memory, *times, str(found["errors"]), ", ".join(beside)]


@_measured("killed_replica", "serving.killed_replica", "answers | wrong | lost | delayed | longest delay, s")
def _killed(found: Values) -> list[str]:
    counts = [str(found[name]) for name in ("answers", "wrong", "lost", "delayed")]
    return [*counts, f"{found['longest_delay']:.2f}"]


@_measured(
    "invocations",
    "bench.invocations",
    "model | prompt tokens | plain LoRA, ms | activated, ms | activated / plain",
)
def _invocations(found: Values) -> list[str]:
    medians = {kind: sorted(each)[len(each) // 2] for kind, each in found["seconds"].items()}
    ratio = medians["activated"] / medians["plain"]
    return [
        found.get("model_size", "-"),
        f"{found['prompt']:,}",
        _ms(medians["plain"]),
        _ms(medians["activated"]),
        f"{ratio:.3f}",
    ]


@_measured("company", "bench.company", "model | step of 8 mixed adapters / base, by sequences")
def _company(found: Values) -> list[str]:
    kinds = [f" on {row['adapters']}" if row.get("adapters", "all") != "all" else "" for row in found["rows"]]
    rows = zip(found["rows"], kinds, strict=True)
    return [found["model_size"], ", ".join(f"{row['sequences']}{kind}: {row['ratio']:.2f}" for row, kind in rows)]


@_measured(
    "families",
    "bench --device cpu --model-size 170m --sections families",
    "share of the limit over Llama's: decode, 1 row | 8 rows | prompts",
)
def _families(found: Values) -> list[str]:
    rows: dict[str, list[str]] = {}
    for row in found["values"]["rows"]:
        if row["family"] != "llama":
            rows.setdefault(row["case"], []).append(f"{row['family']}: {row['over_first']:.2f}")
    return [", ".join(each) for each in rows.values()]


@_measured(
    "prefixes",
    "bench --device cpu --model-size 125m --sections prefixes",
    "prompts, tokens | computed, ms | first token from host memory / computed | from files / computed",
)
def _prefixes(found: Values) -> list[str]:
    values = found["values"]
    hits = {
        tier: ", ".join(
            f"{row['requests']}: {row[tier] / values['computed']:.2f}" for row in values["rows"] if row[tier]
        )
        for tier in ("host", "files")
    }
    return [f"{values['num_adapters']} of {values['prompt_tokens']:,}", _ms(values["computed"]), *hits.values()]


@_measured(
    "company_beside",
    "bench.company_beside",
    "model | base / 8 mixed adapters, by sequences | tokens/s of the adapters",
)
def _company_beside(found: Values) -> list[str]:
    by_server: dict[str, list[Values]] = {}
    for row in found["rows"]:
        by_server.setdefault(row["server"], []).append(row)
    cells = [
        "; ".join(
            f"{server}: " + ", ".join(f"{row['sequences']}: {row[field]:{digits}}" for row in rows)
            for server, rows in by_server.items()
        )
        for field, digits in (("ratio", ".2f"), ("mixed", ".0f"))
    ]
    return [found["model_size"], *cells]


_measured("company_mixture", "bench.company --model-size mixture", "model | step of 8 adapters / base, by sequences")(
    _company
)


@_measured(
    "images",
    "bench.images",
    "tower | encoder / transformers | 8 adapters / none | text beside images / alone | longest step / median",
)
def _images(found: Values) -> list[str]:
    beside = ("images", "requests")
    texts, longest = ([f"{kind}: {found[name][kind]:.2f}" for kind in beside] for name in ("text", "longest"))
    ratios = [f"{found['ratios'][name]:.2f}" for name in ("encoding", "adapters")]
    return [found["model_size"], *ratios, ", ".join(texts), ", ".join(longest)]


@_measured("push", "bench.push", "MB | hash and two copies, ms | form / that | directory / that | descriptor / that")
def _push(found: Values) -> list[str]:
    floor = found["floor"]
    ratios = {way: f"{sorted(each)[len(each) // 2] / floor:.2f}" for way, each in found["seconds"].items()}
    ways = [ratios.get(way, "-") for way in ("form", "directory", "descriptor")]
    return [f"{found['bytes'] / 1e6:.0f}", _ms(floor), *ways]


def page(results: Path) -> str:
    """The text of the page."""
    return "\n".join(_lines(results))


def _lines(results: Path) -> Iterator[str]:
    yield "# Measurements on CPUs\n"
    yield (
        "Drawn by `python -m chorus.perf.report.history` from the folders next to it. `about.txt` in a folder tells "
        "the machine, and whether it was idle: numbers of a busy one show that a command works, and little more.\n"
    )
    folders = sorted((each for each in results.iterdir() if FOLDER.fullmatch(each.name)), reverse=True)
    for name, measured in COMMANDS.items():
        files = [(folder, folder / f"{name}.json") for folder in folders]
        found = [(folder, json.loads(path.read_text("utf-8"))) for folder, path in files if path.exists()]
        if not found:
            continue
        yield f"## `python -m {measured.command}`\n"
        yield f"| date | commit | machine | {measured.columns} |"
        yield "|---" * (4 + measured.columns.count(" | ")) + "|"
        for folder, values in found:
            date, commit = FOLDER.fullmatch(folder.name).groups()  # pyright: ignore[reportOptionalMemberAccess]
            about = (folder / "about.txt").read_text("utf-8").strip()
            yield f"| {date} | {commit} | {about} | {' | '.join(measured.cells(values))} |"
        yield ""


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--check", action="store_true", help="fail if the page is stale")
    command.add_argument("--results", type=Path, default=RESULTS)
    args = command.parse_args(argv)
    path, text = args.results / PAGE, page(args.results)
    if args.check:
        if not path.exists() or path.read_text("utf-8") != text:
            print(f"{path} is stale: run python -m chorus.perf.report.history", file=sys.stderr)
            return 1
        return 0
    path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
