"""Our own format: one `TraceRequest` a line, as `python -m chorus.perf.workload SPEC --write FILE` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal

from ..request import TraceRequest
from .source import Source, TraceRow
from .text import Check, json_lines

_FIELDS = ("arrival", "adapter", "prompt_tokens", "output_tokens")


def write(requests: Iterable[TraceRequest], file: IO[str]) -> int:
    """Writes requests as JSON lines and returns how many; `read` gives the very same back.

    Fields that have their default are left out.
    """
    count = 0
    for request in requests:
        record: dict[str, object] = dict(zip(_FIELDS, request[1:5], strict=True))
        if request.rank is not None:
            record["rank"] = request.rank
        if request.slo is not None:
            record["slo"] = request.slo
        if request.hash_ids:
            record["hash_ids"] = request.hash_ids
            record["hash_block_tokens"] = request.hash_block_tokens
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
    provides = frozenset({"arrival", "adapter", "prompt_tokens", "output_tokens", "rank", "slo", "hash_ids"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        return _rows(self.path)


def _rows(path: Path) -> Iterator[TraceRow]:
    check = Check(path)
    for line, found in json_lines(path, _FIELDS):
        if unknown := found.keys() - set(TraceRow._fields):
            name = min(unknown)
            raise check.error(line, name, found[name], f"no such field; known are {', '.join(TraceRow._fields)}")
        arrival = check.number(line, "arrival", found["arrival"], 0.0)
        check.in_order(line, "arrival", arrival, arrival)
        rank = found.get("rank")
        ids = check.ids(line, "hash_ids", found.get("hash_ids", []))
        yield TraceRow(
            arrival, check.name(line, "adapter", found["adapter"]),
            check.tokens(line, "prompt_tokens", found["prompt_tokens"]),
            check.tokens(line, "output_tokens", found["output_tokens"]),
            None if rank is None else check.tokens(line, "rank", rank, 0), check.name(line, "slo", found.get("slo")),
            ids, check.tokens(line, "hash_block_tokens", found.get("hash_block_tokens")) if ids else 0,
        )  # fmt: skip
