"""Schedules that were measured on a GPU: a JSON file per device in `schedules/`, made by `perf.gpu.tune`.

They are read at start-up, never measured while requests are served. Where a table says nothing, the rules of
`sgmv_schedule` do.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    model_validator,
)

from .schedule_check import check_schedule
from .sgmv_schedule import Kind, RuleSchedules, Schedule

FORMAT = 1

#: Directory of the tables that come with the package; none while no GPU has measured any.
FOLDER = Path(__file__).with_name("schedules")


class ScheduleTableError(ValueError):
    """A file that is no table of schedules; the text names the file and the field."""


def device_key(name: str) -> str:
    """A device's file name without its ending: `nvidia-h200` for NVIDIA H200."""
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not key:
        raise ValueError(f"device name is {name!r}; one with letters or digits is needed")
    return key


def _parse_schedule(value: Any) -> Schedule:
    if not isinstance(value, Mapping):
        raise ValueError("an object of a schedule's fields is needed")
    types = {field.name: bool if field.name == "tensor_cores" else int for field in fields(Schedule)}
    if missing := [name for name in types if name not in value]:
        raise ValueError(f"{missing[0]} is missing")
    if unknown := [name for name in value if name not in types]:
        raise ValueError(f"{unknown[0]} is no field of a schedule; those are {', '.join(types)}")
    for name, kind in types.items():
        if type(value[name]) is not kind:
            raise ValueError(f"{name} is {value[name]!r}; {'true or false' if kind is bool else 'an integer'}")
    return Schedule(**value)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Entry(_Strict):
    """The schedule of steps of up to `tokens` tokens, down to the next smaller entry of the same kind, rank and size.

    max_rank: the largest rank of the tables in decode, the rank class in prefill. us, rule_us: microseconds per layer
    of this schedule and of the rules' (equal where the rules' is kept).
    """

    kind: Kind
    tokens: int = Field(ge=1)
    max_rank: int = Field(ge=1)
    itemsize: Literal[2, 4]
    us: float = Field(gt=0)
    rule_us: float = Field(gt=0)
    schedule: Annotated[InstanceOf[Schedule], BeforeValidator(_parse_schedule)]

    @model_validator(mode="after")
    def _check(self) -> Entry:
        if self.schedule.tensor_cores != (self.kind == "prefill"):
            raise ValueError(f"tensor_cores is {self.schedule.tensor_cores} in an entry of {self.kind}")
        check_schedule(self.schedule, self.max_rank, self.itemsize)
        return self


class MeasuredDevice(_Strict):
    """The GPU that was measured, and what else is known of it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["cuda"]
    name: str = Field(min_length=1)


class Commit(_Strict):
    """The commit that was measured. dirty: with changes that it does not have."""

    hash: str | None
    dirty: bool | None


class ScheduleTable(_Strict):
    """A file's contents: entries, and where they come from. model: whose shapes were measured. method: how."""

    format: Literal[1]
    device: MeasuredDevice
    driver: str | None
    versions: dict[str, str]
    commit: Commit
    date: Annotated[AwareDatetime, Field(strict=False)]
    model: str = Field(min_length=1)
    method: str = Field(min_length=1)
    entries: tuple[Entry, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _no_entry_twice(self) -> ScheduleTable:
        seen = set()
        for entry in self.entries:
            key = (entry.kind, entry.tokens, entry.max_rank, entry.itemsize)
            if key in seen:
                raise ValueError(f"two entries of {entry.kind}, tokens {key[1]}, max_rank {key[2]}, itemsize {key[3]}")
            seen.add(key)
        return self

    @classmethod
    def load(cls, path: Path) -> ScheduleTable:
        """Raises ScheduleTableError."""
        try:
            raw = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ScheduleTableError(f"{path}: cannot be read: {error}") from None
        except ValueError as error:
            raise ScheduleTableError(f"{path}: no JSON: {error}") from None
        table = cls.parse(raw, str(path))
        if (key := device_key(table.device.name)) != path.stem:
            raise ScheduleTableError(f"{path}: device.name is {table.device.name!r}; its file is {key}.json")
        return table

    @classmethod
    def parse(cls, raw: Any, origin: str) -> ScheduleTable:
        """A table from JSON's values. origin: what error messages call it. Raises ScheduleTableError."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "the file"
            shown = "" if isinstance(first["input"], (dict, Entry)) else f" is {first['input']!r:.80}"
            raise ScheduleTableError(
                f"{origin}: {field}{shown}: {first['msg']}; make the file anew with python -m chorus.perf.gpu.tune"
            ) from None


class TableSchedules(RuleSchedules):
    """The table's schedule where it has one for as many tokens or more and just that rank and size; else the rules'."""

    def __init__(self, table: ScheduleTable, name: str) -> None:
        """name: what logs call it."""
        self.name = name
        self._entries: dict[tuple[Kind, int, int], list[tuple[int, Schedule]]] = {}
        for entry in sorted(table.entries, key=lambda entry: entry.tokens):
            group = self._entries.setdefault((entry.kind, entry.max_rank, entry.itemsize), [])
            group.append((entry.tokens, entry.schedule))

    def decode(self, tokens: int, max_rank: int, itemsize: int = 2) -> Schedule:
        return self._find("decode", tokens, max_rank, itemsize) or super().decode(tokens, max_rank, itemsize)

    def prefill(self, tokens: int, max_rank: int, itemsize: int = 2) -> Schedule:
        return self._find("prefill", tokens, max_rank, itemsize) or super().prefill(tokens, max_rank, itemsize)

    def _find(self, kind: Kind, tokens: int, max_rank: int, itemsize: int) -> Schedule | None:
        group = self._entries.get((kind, max_rank, itemsize), [])
        at = bisect_left(group, tokens, key=lambda entry: entry[0])
        return group[at][1] if at < len(group) else None

    def _limits(self, kind: Kind) -> set[int]:
        own = {tokens for key, group in self._entries.items() if key[0] == kind for tokens, _ in group}
        return super()._limits(kind) | own


def schedules_for(device_name: str | None, folder: Path | None = None) -> RuleSchedules:
    """Schedules of a device's steps: its table, if it has one, else the rules alone.

    device_name: as the driver says; None without a GPU. folder: of the tables; FOLDER by default. Raises
    ScheduleTableError for a table that is broken.
    """
    if device_name is None:
        return RuleSchedules()
    path = (folder or FOLDER) / f"{device_key(device_name)}.json"
    if not path.is_file():
        return RuleSchedules()
    return TableSchedules(ScheduleTable.load(path), f"table {path.name}")
