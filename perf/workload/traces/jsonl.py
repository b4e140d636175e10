"""Our own format: one `TraceRequest` a line, as `python -m chorus.perf.workload SPEC --write FILE` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal

from ..request import TraceRequest
from .source import Source, TraceRow
from .text import Rows

_FIELDS = ("arrival", "adapter", "prompt_tokens", "output_tokens")


def write(requests: Iterable[TraceRequest], file: IO[str]) -> int:
    """Writes requests as JSON lines and returns how many; `read` gives the very same back.

    Fields that have their default are left out.
    """
    count = 0
    for request in requests:
        record: dict[str, object] = dict(zip(_FIELDS, request[1:5], strict=True))
        defaults = TraceRequest._field_defaults.items()
        record |= {name: value for name, default in defaults if (value := getattr(request, name)) != default}
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
        count += 1
    return count


def read(path: Path) -> Iterator[TraceRequest]:
    """The requests of such a file."""
    for number, row in enumerate(_rows(path)):
        yield TraceRequest(number, *row)


class Jsonl(Source):
    """Everything that a request has."""

    format: Literal["jsonl"]
    provides = frozenset(
        {"arrival", "adapter", "prompt_tokens", "output_tokens", "rank", "slo", "hash_ids", "tenant", "session"}
    )

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        return _rows(self.path)


def _rows(path: Path) -> Iterator[TraceRow]:
    file = Rows(path)
    for found in file.json(*_FIELDS):
        if unknown := found.keys() - set(TraceRow._fields):
            name = min(unknown)
            raise file.error(name, found[name], f"no such field; known are {', '.join(TraceRow._fields)}")
        arrival, rank = file.number("arrival", found["arrival"], 0.0), found.get("rank")
        ids = file.ids("hash_ids", found.get("hash_ids", []))
        yield TraceRow(
            file.in_order("arrival", arrival, arrival), file.name("adapter", found["adapter"]),
            *(file.tokens(name, found[name]) for name in _FIELDS[2:]),
            None if rank is None else file.tokens("rank", rank, 0), file.name("slo", found.get("slo")),
            ids, file.tokens("hash_block_tokens", found.get("hash_block_tokens")) if ids else 0,
            file.name("tenant", found.get("tenant")), file.name("session", found.get("session")),
        )  # fmt: skip
