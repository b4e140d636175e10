"""Azure Functions invocation trace of 2021 (MAF2): columns app, func, end_timestamp, duration.

CaraServe (§7.1) and dLoRA (§7.1) take each function, or each group of functions, for one adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .source import Source, TraceRow
from .text import Check, csv_fields

_SHOWN = 12


class AzureFunctions(Source):
    """Arrivals (end_timestamp − duration, seconds) and adapters: the beginning of a function's hash."""

    format: Literal["azure_functions"]
    provides = frozenset({"arrival", "adapter"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        check = Check(self.path)
        names: dict[str, str] = {}
        for line, (function, end, took) in csv_fields(self.path, ("func", "end_timestamp", "duration")):
            if not function:
                raise check.error(line, "func", function, "it must name the function")
            seconds = check.number(line, "end_timestamp", end) - check.number(line, "duration", took, 0.0)
            check.in_order(line, "end_timestamp - duration", seconds, seconds)
            yield TraceRow(seconds, names.setdefault(function, function[:_SHOWN]))
