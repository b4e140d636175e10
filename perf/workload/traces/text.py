"""Lines, fields and numbers of trace files, with an error that says where and what."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import TraceError

_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def open_text(path: Path) -> IO[str]:
    """The file as text; .gz, .xz and .bz2 are read as they are."""
    try:
        if path.suffix in _OPENERS:
            return io.TextIOWrapper(_OPENERS[path.suffix](path, "rb"), "utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TraceError(path, None, f"the trace cannot be opened ({error.strerror})", "check the path") from None


def csv_fields(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(line, values of the named columns) of each row of a CSV file with a header; empty lines are left out."""
    with open_text(path) as file:
        reader = csv.reader(file)
        try:
            header = [name.strip() for name in next(reader, [])]
            if missing := [name for name in columns if name not in header]:
                have = ", ".join(header) or "nothing"
                raise TraceError(
                    path, 1, f"no column {missing[0]!r} (the header has {have})", "give the file of that format"
                )
            indices = [header.index(name) for name in columns]
            width = len(header)
            for row in reader:
                if len(row) == width:
                    yield reader.line_num, [row[index] for index in indices]
                elif row:
                    raise TraceError(
                        path, reader.line_num, f"{len(row)} fields, the header has {width}", "mend or drop the line"
                    )
        except (csv.Error, UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
            raise TraceError(path, reader.line_num, f"not readable as CSV ({error})", "give an intact file") from None


def json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line, which must have the named fields; empty lines are left out."""
    with open_text(path) as file:
        line = 0
        try:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                found = json.loads(text)
                if not isinstance(found, dict):
                    raise TraceError(path, line, f"a {type(found).__name__}, not an object", "mend or drop the line")
                if missing := [name for name in fields if name not in found]:
                    have = ", ".join(found) or "nothing"
                    raise TraceError(
                        path, line, f"no field {missing[0]!r} (it has {have})", "give the file of that format"
                    )
                yield line, found
        except json.JSONDecodeError as error:
            raise TraceError(path, line, f"not JSON ({error.msg}, column {error.colno})", "mend the line") from None
        except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
            raise TraceError(path, line + 1, f"not readable ({error})", "give an intact file") from None


class Check:
    """Turns a trace's fields into numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._latest = -math.inf

    def tokens(self, line: int, field: str, value: Any, least: int = 1) -> int:
        """A whole number of at least `least`."""
        try:
            number = int(value)
            if number < least or (not isinstance(value, str) and number != value) or isinstance(value, bool):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise self.error(line, field, value, f"it must be a whole number of at least {least}") from None
        return number

    def number(self, line: int, field: str, value: Any, least: float = -math.inf) -> float:
        """A finite number of at least `least`."""
        try:
            number = float(value)
            if not math.isfinite(number) or number < least or isinstance(value, bool):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            bound = "" if least == -math.inf else f" of at least {least:g}"
            raise self.error(line, field, value, f"it must be a finite number{bound}") from None
        return number

    def ids(self, line: int, field: str, value: Any) -> tuple[int, ...]:
        """A list of whole numbers, none negative."""
        if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
            raise self.error(line, field, value, "it must be a list of whole numbers, none negative")
        return tuple(value)

    def name(self, line: int, field: str, value: Any) -> str | None:
        """A name, or null."""
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(line, field, value, "it must be a name, or null")
        return value

    def in_order(self, line: int, field: str, value: Any, time: float) -> float:
        """A time that is not before the one of the row before."""
        if time < self._latest:
            raise self.error(line, field, value, "it is before the row above; sort the file by time of arrival")
        self._latest = time
        return time

    def error(self, line: int, field: str, value: Any, mend: str) -> TraceError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return TraceError(self.path, line, f"{field} is {shown}", mend)
