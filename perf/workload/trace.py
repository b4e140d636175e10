"""Traces: CSV files with one request per row, and a header that names the columns.

Tests: tests/perf/workload/test_traces.py
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationInfo, field_validator

from .fields import Strict, WorkloadError


class TraceError(WorkloadError):
    """A trace can't be read: file, line, field, value and fix."""

    def __init__(self, path: Path, line: int | None, problem: str, mend: str) -> None:
        super().__init__(f"{path}{'' if line is None else f':{line}'}: {problem}; {mend}")


class TraceRow(NamedTuple):
    """One row of a trace; None for values that the trace does not have."""

    arrival: float | None = None
    """Seconds from any fixed time."""
    adapter: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    rank: int | None = None
    tenant: str | None = None


class Csv(Strict):
    """Requests with a column for each field, named like the field or by its entry in `names`; other columns are
    ignored.
    """

    format: Literal["csv"]
    path: Path
    """A relative one in a specification file counts from that file. arrival: seconds from any moment, or a time like
    2023-11-16 18:17:03.98. An empty adapter is the base model; an empty rank or tenant is none.
    """
    names: dict[str, str] = {}
    sort: bool = False
    """Rows are in another order: `chorus serve --record` writes them when requests end."""

    @field_validator("path")
    @classmethod
    def _from_specification(cls, path: Path, info: ValidationInfo) -> Path:
        base = (info.context or {}).get("base")
        return Path(base) / path if base is not None else path

    @field_validator("names")
    @classmethod
    def _are_fields(cls, names: dict[str, str]) -> dict[str, str]:
        for name in names:
            if name not in TraceRow._fields:
                raise ValueError(
                    f"names has {name!r}, not a field of a request; use some of {', '.join(TraceRow._fields)}"
                )
        return names

    def needs(self, field: str, wanted_by: str) -> None:
        """Raise WorkloadError if the trace has no column for a field."""
        columns = self._columns(next(self._lines(), (1, []))[1])
        if field not in columns:
            raise WorkloadError(
                f"{wanted_by}: the trace ({self.path}) has no {field}, only "
                f"{', '.join(sorted(columns)) or 'nothing that can be read'}; use another trace or kind here"
            )

    def rows(self) -> list[TraceRow]:
        """Return all rows in order of arrival. Raises TraceError."""
        lines = self._lines()
        _, header = next(lines, (1, []))
        columns = self._columns(header)
        for name in self.names.values():
            if name not in header:
                have = ", ".join(header) or "nothing"
                raise TraceError(self.path, 1, f"no column {name!r} (the header has {have})", "give one that has it")
        if not columns:
            mend = f"name a column after one of {', '.join(TraceRow._fields)}"
            raise TraceError(self.path, 1, f"the header is {', '.join(header)!r}", mend)
        found: list[TraceRow] = []
        for line, values in lines:
            if not values:
                continue
            if len(values) != len(header):
                problem = f"{len(values)} fields, the header has {len(header)}"
                raise TraceError(self.path, line, problem, "fix or remove the line")
            row = TraceRow(
                **{field: self._value(line, field, header[place], values[place]) for field, place in columns.items()}
            )
            if found and not self.sort and (row.arrival or 0.0) < (found[-1].arrival or 0.0):
                value = values[columns["arrival"]]
                mend = "it is before the row above; sort the file by time of arrival, or set sort"
                raise TraceError(self.path, line, f"{header[columns['arrival']]} is {value!r}", mend)
            found.append(row)
        if not found:
            raise TraceError(self.path, None, "the trace has no rows", "give one with requests")
        return sorted(found, key=lambda row: row.arrival or 0.0) if self.sort else found

    def _columns(self, header: list[str]) -> dict[str, int]:
        """Return the position of each field that the header has."""
        named = {field: self.names.get(field, field) for field in TraceRow._fields}
        return {field: header.index(name) for field, name in named.items() if name in header}

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the number and the fields of each line."""
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                for row in (reader := csv.reader(file)):
                    yield reader.line_num, [each.strip() for each in row]
        except OSError as error:
            raise TraceError(self.path, None, f"the trace cannot be opened ({error.strerror})", "check it") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise TraceError(self.path, None, f"not readable as CSV ({error})", "give an intact file") from None

    def _value(self, line: int, field: str, column: str, text: str) -> Any:
        if field in ("adapter", "tenant") or (field == "rank" and not text):
            return text or None
        parse, mend = _NUMBERS[field]
        try:
            return parse(text)
        except ValueError:
            raise TraceError(self.path, line, f"{column} is {text!r:.80}", f"it must be {mend}") from None


def _seconds(text: str) -> float:
    """Seconds, or a time like 2023-11-16 18:17:03.98 as seconds since 1970."""
    try:
        seconds = float(text)
    except ValueError:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError
    return seconds


def _at_least(least: int) -> tuple[Callable[[str], int], str]:
    def parse(text: str) -> int:
        if (number := int(text)) < least:
            raise ValueError
        return number

    return parse, f"a whole number of at least {least}"


_NUMBERS: dict[str, tuple[Callable[[str], float], str]] = {
    "arrival": (_seconds, "seconds, or a time like 2023-11-16 18:17:03.98"),
    "prompt_tokens": _at_least(1),
    "output_tokens": _at_least(1),
    "rank": _at_least(0),
}
