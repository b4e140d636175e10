"""`chorus usage`: adds up a usage file, as CSV or JSON for a bill."""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from ..engine.usage_file import COLUMNS, HEADER, Used
from ..start.flags import UsageError

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_TYPES: dict[str, Callable[[str], Any]] = {
    one.name: float if one.name.endswith("_seconds") else int for one in fields(Used)
}
_KEYS = {"tenant": ("tenant",), "model": ("model",), "both": ("tenant", "model")}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file that a server writes with --usage-file")
    parser.add_argument(
        "--since",
        type=_time,
        metavar="TIME",
        help="count requests that ended at this time or later: 2026-11-01, 2026-11-01T12:30, either in UTC or with an "
        "offset such as +01:00, or 24h, 30d or 4w ago. Default: from the file's beginning",
    )
    parser.add_argument("--until", type=_time, metavar="TIME", help="count requests that ended before. Default: all")
    parser.add_argument(
        "--by",
        choices=tuple(_KEYS),
        default="both",
        help="rows: tenants, models, or pairs. Default: both",
    )
    parser.add_argument("--format", choices=("csv", "json"), default="csv", help="Default: csv")


def run(arguments: argparse.Namespace) -> int:
    keys = _KEYS[arguments.by]
    try:
        with arguments.file.open(newline="", encoding="utf-8") as file:
            rows, num_bad = totals(file, keys, arguments.since, arguments.until)
    except OSError as error:
        raise UsageError(f"{arguments.file}: {error.strerror}; name the file of a server's --usage-file") from None
    except NotUsage:
        raise UsageError(f"{arguments.file}: not a usage file; name the file of a server's --usage-file") from None
    if num_bad:
        print(f"chorus: warning: {arguments.file}: {num_bad} lines can't be read, and are left out", file=sys.stderr)
    if arguments.format == "json":
        json.dump(rows, sys.stdout, indent=1)
        print()
        return 0
    table = csv.DictWriter(sys.stdout, [*keys, *_TYPES], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return 0


class NotUsage(ValueError):
    """The file holds something else."""


def totals(
    file: TextIO, keys: tuple[str, ...], since: datetime | None = None, until: datetime | None = None
) -> tuple[list[dict[str, Any]], int]:
    """What was used by each combination of `keys`, sorted by these, and the number of lines that can't be read.

    Raises NotUsage.
    """
    if file.readline().rstrip("\n") != HEADER:
        raise NotUsage
    sums: dict[tuple[str, ...], Used] = {}
    num_bad = 0
    for found in _rows(file):
        if found is None:
            num_bad += 1
            continue
        time, names, used = found
        if (since is None or time >= since.timestamp()) and (until is None or time < until.timestamp()):
            sums.setdefault(tuple(names[key] for key in keys), Used()).add(used)
    return [
        dict(zip(keys, names, strict=True)) | {name: _rounded(value) for name, value in asdict(used).items()}
        for names, used in sorted(sums.items())
    ], num_bad


def _rows(file: TextIO) -> Iterator[tuple[float, dict[str, str], Used] | None]:
    """The time, names and counts of each line; None for a line that can't be read, such as one cut off by a crash."""
    for line in csv.reader(file):
        if len(line) != len(COLUMNS):
            yield None
            continue
        row = dict(zip(COLUMNS, line, strict=True))
        try:
            yield float(row["time"]), row, Used(**{name: read(row[name]) for name, read in _TYPES.items()})
        except ValueError:
            yield None


def _rounded(value: float) -> float:
    return round(value, 6)


def _time(text: str) -> datetime:
    if ago := re.fullmatch(r"(\d{1,5})([hdw])", text):
        return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; give one like 2026-11-01, 2026-11-01T12:30+01:00, 24h, 30d or 4w"
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
