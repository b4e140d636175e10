"""`chorus usage`: adds up usage files, as CSV or JSON for a bill.

Tests: tests/server/engine/test_usage_file.py
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from ..engine.usage_file import COLUMNS, HEADER, Used
from ..start.flags import UsageError

_GZIP = b"\x1f\x8b"
"""How an archive begins."""

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_TYPES: dict[str, Callable[[str], Any]] = {
    one.name: float if one.name.endswith("_seconds") else int for one in fields(Used)
}
_KEYS = {"tenant": ("tenant",), "model": ("model",), "both": ("tenant", "model")}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="the file of a server's --usage-file, or an older one that was moved away; gzip-compressed ones, too",
    )
    parser.add_argument(
        "--since",
        type=_time,
        metavar="TIME",
        help="count requests that ended at this time or later: 2026-11-01, 2026-11-01T12:30, either in UTC or with an "
        "offset such as +01:00, or 24h, 30d or 4w ago. Default: from the files' beginning",
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
    since, until = arguments.since, arguments.until
    if since is not None and until is not None and until <= since:
        raise UsageError(f"--until is {until}, not after --since, which is {since}: give a later --until")
    keys = _KEYS[arguments.by]
    sums: dict[tuple[str, ...], Used] = {}
    for path in arguments.files:
        if num_bad := _add_file(path, sums, keys, since, until):
            print(f"chorus: warning: {path}: {num_bad} lines can't be read, and are left out", file=sys.stderr)
    rows = [
        dict(zip(keys, names, strict=True)) | {name: _rounded(value) for name, value in asdict(used).items()}
        for names, used in sorted(sums.items())
    ]
    if arguments.format == "json":
        json.dump(rows, sys.stdout, indent=1)
        print()
        return 0
    table = csv.DictWriter(sys.stdout, [*keys, *_TYPES], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return 0


def _add_file(
    path: Path,
    sums: dict[tuple[str, ...], Used],
    keys: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
) -> int:
    """Add a file's rows to the sums by `keys`, and return the number of lines that can't be read. Raises UsageError."""
    num_bad = 0
    try:
        with _opened(path) as file:
            if file.readline().rstrip("\n") != HEADER:
                raise UsageError(f"{path}: not a usage file; name the file of a server's --usage-file")
            for found in map(_read, file):
                if found is None:
                    num_bad += 1
                    continue
                time, names, used = found
                if (since is None or time >= since.timestamp()) and (until is None or time < until.timestamp()):
                    sums.setdefault(tuple(names[key] for key in keys), Used()).add(used)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path}: a damaged archive ({error}); name a whole one, or the file before it") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name the file of a server's --usage-file") from None
    return num_bad


def _opened(path: Path) -> TextIO:
    """The file's text; bytes of a cut line may be none."""
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP)) == _GZIP
    if is_compressed:
        return gzip.open(path, "rt", newline="\n", encoding="utf-8", errors="replace")
    return path.open(newline="\n", encoding="utf-8", errors="replace")


def _read(line: str) -> tuple[float, dict[str, str], Used] | None:
    """The time, names and counts of a line; None if it can't be read, such as one cut off by a crash."""
    try:
        (values,) = csv.reader([line])  # a line by itself: a quote of a cut one must not hide others
        row = dict(zip(COLUMNS, values, strict=True))
        return float(row["time"]), row, Used(**{name: read(row[name]) for name, read in _TYPES.items()})
    except (ValueError, csv.Error):
        return None


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
