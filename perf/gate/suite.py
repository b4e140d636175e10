"""The metrics of a suite, as its TOML file lists them.

Tests: tests/perf/gate/test_gate.py
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Better = Literal["lower", "higher", "same"]
Kind = Literal["exact", "ratio", "measured"]


class GateError(Exception):
    """Something can't be compared; the message gives the remedy."""


def find(document: Any, pointer: str) -> Any:
    """The value that a JSON pointer (RFC 6901) such as `/cases/mixed/0` refers to; None if there is none."""
    found = document
    for token in pointer.split("/")[1:]:
        token = token.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and token in found:
            found = found[token]
        elif isinstance(found, list) and token.isdigit() and int(token) < len(found):
            found = found[int(token)]
        else:
            return None
    return found


#: A JSON pointer; the empty one is the whole document.
Pointer = Annotated[str, Field(pattern="^(/|$)")]

#: Factor of floors and caps if the baseline is another device's.
ELSEWHERE = 2.0


class Rule(BaseModel):
    """Rules for comparing values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    """Exact values do not vary; ratios compare things on one machine; measured values depend on the device."""
    floor: float = Field(default=0.05, ge=0)
    """Share by which the median may always be worse."""
    cap: float = Field(default=0.5, gt=0)
    """Largest share that noise can excuse."""
    noise: float = Field(default=3.0, ge=0)
    """Number of standard deviations, estimated from the repeats, that count as noise."""
    local: bool = False
    """Only compared with a baseline of the same device, in a suite that is otherwise portable."""


class MetricEntry(Rule):
    """One value, or a list of repeats."""

    name: str = Field(min_length=1)
    at: Pointer
    better: Better


class TableEntry(Rule):
    """Values of every row of a list.

    A row is identified by its `key` columns; by default by all text and yes/no columns.
    """

    name: str = ""
    """Beginning of the metrics' names."""

    at: Pointer
    key: list[str] | None = None
    values: list[str] | None = None
    """Columns to compare (default: all numbers)."""
    better: Better | dict[str, Better] = "same"
    """Which direction is better, for all columns, or by column."""


class Suite(BaseModel):
    """A kind of result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    match: list[Pointer] = []
    """Pointers that only results of this suite have."""
    device: Pointer | None = None
    """Pointer to the device's name; without it, every machine gives the same values."""
    portable: bool = False
    """Other devices may be compared, too, with floors and caps `ELSEWHERE` times as large."""
    variant: Pointer | None = None
    """Pointer to the load's name, if there are several."""
    commit: Pointer | None = None
    """Pointer to the commit that a result was taken with, which its baseline names."""
    date: Pointer | None = None
    """Pointer to the date of a result; without it, a baseline is of the day on which it is written."""
    same: list[Pointer] = []
    """Pointers to values that must equal the baseline's, such as the load's size."""
    metrics: list[MetricEntry] = []
    tables: list[TableEntry] = []
    name: str = ""

    @classmethod
    def read(cls, path: Path) -> Suite:
        """Raises GateError, which names the file and the field."""
        try:
            fields = tomllib.loads(path.read_text("utf-8"))
            return cls(**{**fields, "name": path.stem})
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise GateError(f"{path} can't be read: {error}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise GateError(f"{path}: {field} is {first['input']!r}: {first['msg']}") from None

    def fits(self, result: dict[str, Any]) -> bool:
        return bool(self.match) and all(find(result, pointer) is not None for pointer in self.match)

    def readings(self, result: dict[str, Any]) -> Iterator[tuple[Metric, tuple[float, ...]]]:
        """Every metric that the suite names, and every one in the rows of its tables, with the readings.

        Raises GateError for a row that appears twice.
        """
        for entry in self.metrics:
            yield Metric(entry.name, entry.better, entry), _numbers(find(result, entry.at))
        seen: set[str] = set()
        for table in self.tables:
            for metric, values in _rows(result, table):
                if metric.name in seen:
                    raise GateError(
                        f"{self.name}: two rows of {table.at} are both {metric.name}; add the column that tells them "
                        "apart to the table's key"
                    )
                seen.add(metric.name)
                yield metric, values


@dataclass(frozen=True)
class Metric:
    """A named value and how it is compared."""

    name: str
    better: Better
    rule: Rule


def suites(directory: Path) -> dict[str, Suite]:
    """The suites with a TOML file in a directory, by name."""
    if not directory.is_dir():
        raise GateError(f"there is no directory of baselines {directory}")
    return {path.stem: Suite.read(path) for path in sorted(directory.glob("*.toml"))}


def suite_of(result: dict[str, Any], known: dict[str, Suite]) -> Suite:
    """The only suite that a result fits. Raises GateError if there is none, or more than one."""
    fitting = [suite for suite in known.values() if suite.fits(result)]
    if len(fitting) != 1:
        found = "several suites" if fitting else "no suite"
        raise GateError(f"the result fits {found} of {', '.join(known)} (its keys: {', '.join(result)[:200]})")
    return fitting[0]


def _rows(result: dict[str, Any], table: TableEntry) -> Iterator[tuple[Metric, tuple[float, ...]]]:
    for row in find(result, table.at) or ():
        key = table.key if table.key is not None else [name for name, value in row.items() if _is_label(value)]
        label = " ".join([table.name, *(str(row.get(name)) for name in key)]).strip()
        named = table.values if table.values is not None else [name for name in row if _is_number(row[name])]
        for column in named:
            if column in key or row.get(column) is None:
                continue
            better = table.better if isinstance(table.better, str) else table.better.get(column, "same")
            yield Metric(f"{label} {column}".strip(), better, table), _numbers(row.get(column))


def _numbers(found: Any) -> tuple[float, ...]:
    """Numbers of a value or of a list; nothing for anything else."""
    values = found if isinstance(found, list) else [found]
    return tuple(float(value) for value in values) if all(_is_number(value) for value in values) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_label(value: Any) -> bool:
    return isinstance(value, str | bool)
