"""Two traces of a text-to-image service with LoRA adapters at Alibaba, for research use only.

The sequence names each request's adapters in order but has no times; the request trace has times but no names. Their
lengths are characters of image prompts, so neither gives tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Literal

from .source import Source, TraceRow
from .text import Check, csv_fields

_EPOCH = datetime(1970, 1, 1)


class LoraSequence(Source):
    """Adapters in order of request: columns row and lora_ids, ids parted by spaces.

    A request with several adapters counts for its first, one with none for the base model.
    """

    format: Literal["lora_sequence"]
    provides = frozenset({"adapter"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        check = Check(self.path)
        for line, (row, ids) in csv_fields(self.path, ("row", "lora_ids")):
            check.in_order(line, "row", row, check.tokens(line, "row", row, 0))
            yield TraceRow(adapter=ids.split()[0] if ids.strip() else None)


class LoraRequests(Source):
    """Arrivals, to the second: column gmt_create."""

    format: Literal["lora_requests"]
    provides = frozenset({"arrival"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        check = Check(self.path)
        for line, (when,) in csv_fields(self.path, ("gmt_create",)):
            try:
                seconds = (datetime.fromisoformat(when) - _EPOCH).total_seconds()
            except (ValueError, TypeError):
                raise check.error(line, "gmt_create", when, "it must be a time like 2024-11-15 16:57:50") from None
            yield TraceRow(check.in_order(line, "gmt_create", when, seconds))
