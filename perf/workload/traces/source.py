"""Interface of trace readers: rows in order of time, and the columns that it can give."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import ValidationInfo, field_validator

from ..errors import TraceError, WorkloadError
from ..model import Strict

#: Characters of a hash that name what it stands for.
SHOWN = 12


class TraceRow(NamedTuple):
    """One row of a trace; None where the trace does not say.

    arrival: seconds, from whatever moment the trace counts. adapter: name, None for the base model. tenant, session:
    names.
    """

    arrival: float | None = None
    adapter: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    rank: int | None = None
    slo: str | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 0
    tenant: str | None = None
    session: str | None = None


class Source(Strict):
    """A trace on disk. Reading it again gives the same rows; memory does not grow with its length.

    path: of the trace; a relative one in a specification file counts from that file.
    """

    path: Path

    #: fields of `TraceRow` that this format has
    provides: ClassVar[frozenset[str]] = frozenset()

    @field_validator("path")
    @classmethod
    def _from_specification(cls, path: Path, info: ValidationInfo) -> Path:
        base = (info.context or {}).get("base")
        return Path(base) / path if base is not None else path

    @abstractmethod
    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        """All rows in order of arrival. seed: for formats that describe a distribution, not requests.

        Raises:
            TraceError: for a file that cannot be read; names file, line, field, value and mend.
        """

    def has(self, field: str) -> bool:
        """True if rows tell a field of `TraceRow`."""
        return field in self.provides

    def needs(self, field: str, wanted_by: str) -> None:
        """Refuses a use that this trace has no column for."""
        if not self.has(field):
            have = ", ".join(sorted(filter(self.has, self.provides))) or "nothing that can be read"
            raise WorkloadError(
                f"{wanted_by}: a trace of this format ({type(self).__name__}, {self.path}) has no {field}, only "
                f"{have}; use another trace or kind here"
            )

    def columns(self, *fields: str, seed: int = 0, size: int = 8192) -> Iterator[dict[str, list[Any]]]:
        """Chunks of up to `size` rows, as lists by field."""
        indices = [TraceRow._fields.index(field) for field in fields]
        rows = self.rows(seed)
        while chunk := list(itertools.islice(rows, size)):
            columns = list(zip(*chunk, strict=True))
            yield {field: list(columns[index]) for field, index in zip(fields, indices, strict=True)}

    def adapter_counts(self, seed: int = 0) -> list[tuple[str | None, int]]:
        """Adapters and their requests, most popular first, of equal ones the first seen; None: the base model."""
        counts: Counter[str | None] = Counter()
        for chunk in self.columns("adapter", seed=seed):
            counts.update(chunk["adapter"])
        if not counts:
            raise TraceError(self.path, None, "the trace has no rows", "give one with requests")
        return counts.most_common()
