"""Rows of trace files, and their fields as numbers and names, with errors that say where and what."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from ..errors import TraceError

_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_MOST_SHOWN = 20  # columns
_BROKEN = (csv.Error, UnicodeDecodeError, EOFError, OSError, lzma.LZMAError)


def open_text(path: Path) -> IO[str]:
    """The file as text; .gz, .xz and .bz2 are read as they are."""
    try:
        if path.suffix in _OPENERS:
            return io.TextIOWrapper(_OPENERS[path.suffix](path, "rb"), "utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TraceError(path, None, f"the trace cannot be opened ({error.strerror})", "check the path") from None


class Rows:
    """Rows of one file, in order; the checks are about fields of the row that was read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0
        self._latest = -math.inf

    def header(self, *columns: str) -> list[str]:
        """Return the names of a CSV file's columns, which must have the given ones."""
        with open_text(self._path) as file:
            return self._header(self.table(file), columns)

    def _header(self, rows: Iterator[list[str]], columns: tuple[str, ...]) -> list[str]:
        header = [name.strip() for name in next(rows, [])]
        if missing := [name for name in columns if name not in header]:
            have = ", ".join(header[:_MOST_SHOWN]) or "nothing"
            raise TraceError(
                self._path, 1, f"no column {missing[0]!r} (the header has {have})", "give the file of that format"
            )
        return header

    def csv(self, *columns: str) -> Iterator[list[str]]:
        """Values of the named columns of a CSV file with a header; empty lines are left out."""
        with open_text(self._path) as file:
            rows = self.table(file)
            header = self._header(rows, columns)
            places = {name: index for index, name in reversed(list(enumerate(header)))}
            indices = [places[name] for name in columns]
            for row in rows:
                if len(row) == len(header):
                    yield [row[index] for index in indices]
                elif row:
                    problem = f"{len(row)} fields, the header has {len(header)}"
                    raise TraceError(self._path, self._line, problem, "mend or drop the line")

    def table(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """All fields of every line of a CSV file."""
        reader = csv.reader(lines)
        try:
            for row in reader:
                self._line = reader.line_num
                yield row
        except _BROKEN as error:
            problem = f"not readable as CSV ({error})"
            raise TraceError(self._path, reader.line_num, problem, "give an intact file") from None

    def json(self, *fields: str) -> Iterator[dict[str, Any]]:
        """The object of each line, which must have the named fields; empty lines are left out."""
        with open_text(self._path) as file:
            try:
                for self._line, text in enumerate(file, 1):
                    if text.strip():
                        yield self._object(text, fields)
            except _BROKEN as error:
                raise TraceError(self._path, self._line + 1, f"not readable ({error})", "give an intact file") from None

    def _object(self, text: str, fields: tuple[str, ...]) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            problem = f"not JSON ({error.msg}, column {error.colno})"
            raise TraceError(self._path, self._line, problem, "mend the line") from None
        if not isinstance(found, dict):
            problem = f"a {type(found).__name__}, not an object"
            raise TraceError(self._path, self._line, problem, "mend or drop the line")
        if missing := [name for name in fields if name not in found]:
            problem = f"no field {missing[0]!r} (it has {', '.join(found)})"
            raise TraceError(self._path, self._line, problem, "give the file of that format")
        return found

    def tokens(self, field: str, value: Any, least: int = 1) -> int:
        """A whole number of at least `least`."""
        try:
            number = int(value)
            if number < least or (not isinstance(value, str) and number != value) or isinstance(value, bool):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise self.error(field, value, f"it must be a whole number of at least {least}") from None
        return number

    def number(self, field: str, value: Any, least: float = -math.inf) -> float:
        """A finite number of at least `least`."""
        try:
            number = float(value)
            if not math.isfinite(number) or number < least or isinstance(value, bool):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            bound = "" if least == -math.inf else f" of at least {least:g}"
            raise self.error(field, value, f"it must be a finite number{bound}") from None
        return number

    def seconds(self, field: str, value: str) -> float:
        """A finite number, or a time like 2023-11-16 18:17:03.98 as seconds since 1970."""
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            mend = "it must be seconds, or a time like 2023-11-16 18:17:03.98"
            try:
                return self.number(field, value)
            except TraceError:
                raise self.error(field, value, mend) from None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()

    def ids(self, field: str, value: Any) -> tuple[int, ...]:
        """A list of whole numbers, none negative."""
        if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
            raise self.error(field, value, "it must be a list of whole numbers, none negative")
        return tuple(value)

    def in_order(self, field: str, value: Any, time: float) -> float:
        """A time that is not before the one of the row before."""
        if time < self._latest:
            raise self.error(field, value, "it is before the row above; sort the file by time of arrival")
        self._latest = time
        return time

    def error(self, field: str, value: Any, mend: str) -> TraceError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return TraceError(self._path, self._line or None, f"{field} is {shown}", mend)
