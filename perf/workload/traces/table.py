"""CSV of one's own: a request a row, under a header that names the columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from .source import Source, TraceRow
from .text import Rows

_NAMES = ("adapter", "slo", "tenant", "session")
_TOKENS = {"prompt_tokens": 1, "output_tokens": 1, "rank": 0}  # with the least value of each
_FIELDS = ("arrival", *_NAMES, *_TOKENS)


class Csv(Source):
    """Requests with a column for each field, of the field's name or of its name in `names`; others are not read.

    arrival: seconds from any moment, or a time like 2023-11-16 18:17:03.98. An empty adapter is the base model; an
    empty rank, slo, tenant or session is none. sort: rows are in another order, as `chorus serve --record` writes them
    when their requests end; all of them are then kept in memory.
    """

    format: Literal["csv"]
    names: dict[str, str] = {}
    sort: bool = False
    provides = frozenset(_FIELDS)

    @field_validator("names")
    @classmethod
    def _are_fields(cls, names: dict[str, str]) -> dict[str, str]:
        for name in names:
            if name not in _FIELDS:
                raise ValueError(f"names has {name!r}, no field of a request; use some of {', '.join(_FIELDS)}")
        return names

    def has(self, field: str) -> bool:
        return self.names.get(field, field) in Rows(self.path).header()

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        rows = self._rows()
        return iter(sorted(rows, key=lambda row: row.arrival or 0.0)) if self.sort else rows

    def _rows(self) -> Iterator[TraceRow]:
        file = Rows(self.path)
        header = file.header(*self.names.values())
        columns = {field: self.names.get(field, field) for field in _FIELDS if self.names.get(field, field) in header}
        if not columns:
            raise file.error("the header", ", ".join(header), f"name a column after one of {', '.join(_FIELDS)}")
        for values in file.csv(*columns.values()):
            found = {}
            for (field, column), value in zip(columns.items(), values, strict=True):
                if field == "arrival":
                    time = file.seconds(column, value)
                    found[field] = time if self.sort else file.in_order(column, value, time)
                elif field in _NAMES or (field == "rank" and not value):
                    found[field] = value or None
                else:
                    found[field] = file.tokens(column, value, _TOKENS[field])
            yield TraceRow(**found)
