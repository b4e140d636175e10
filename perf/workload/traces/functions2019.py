"""Azure Functions invocation trace of 2019 (MAF1; CC-BY-4.0), described in "Serverless in the Wild" (ATC 2020).

A file `invocations_per_function_md.anon.dNN.csv` is one day: a row a function, with how often it was invoked in each
minute. CaraServe (§7.1, §7.5) and dLoRA (§7.1) take each function, or each group of functions, for one adapter.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from ..seeds import stream
from .source import SHOWN, Source, TraceRow
from .text import Rows

_KEYS = ("HashOwner", "HashFunction")


class AzureFunctions2019(Source):
    """Arrivals, functions as adapters, and their owners as tenants: the beginnings of their hashes.

    The trace counts by the minute; within one, requests come at any time, drawn from the seed. start: minute to begin
    at. functions: the most invoked so many, of equal ones the first in the file; default: all. rate_scale: multiplies
    all counts; what is then left of a request comes with that probability.
    """

    format: Literal["azure_functions_2019"]
    start: NonNegativeInt = 0
    functions: PositiveInt | None = None
    rate_scale: PositiveFloat = 1.0
    provides = frozenset({"arrival", "adapter", "tenant"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        names, minutes, functions, counts = self._read()
        rng = stream(seed, "azure_functions_2019")
        for minute in range(self.start, int(minutes.max(initial=0)) + 1):
            here = slice(*np.searchsorted(minutes, (minute, minute + 1)))
            scaled = counts[here] * self.rate_scale
            whole = np.floor(scaled + rng.random(len(scaled))) if self.rate_scale != 1.0 else scaled
            chosen = np.repeat(functions[here], whole.astype(np.int64))
            seconds = rng.random(len(chosen)) * 60.0
            order = np.argsort(seconds, kind="stable")
            begin = 60.0 * (minute - self.start)
            for second, function in zip((begin + seconds[order]).tolist(), chosen[order].tolist(), strict=True):
                owner, name = names[function]
                yield TraceRow(second, name, tenant=owner)

    def _read(self) -> tuple[list[tuple[str, str]], np.ndarray, np.ndarray, np.ndarray]:
        """Owner and name of each function; then minute, function and count of every count above 0, by minute.

        All of them are held, 12 bytes each: the file goes by function and requests come by time.
        """
        file = Rows(self.path)
        columns = file.header(*_KEYS)
        days = [str(minute) for minute in range(1, 1 + sum(name.isdecimal() for name in columns))]
        names: list[tuple[str, str]] = []
        minutes, functions, found = array("I"), array("I"), array("I")
        for owner, name, *given in file.csv(*_KEYS, *days):
            for field, value in zip(_KEYS, (owner, name), strict=True):
                if not value:
                    raise file.error(field, value, "it must be a hash")
            counts = self._counts(file, given)
            places = np.flatnonzero(counts)
            minutes.extend(places.tolist())
            functions.extend([len(names)] * len(places))
            found.extend(counts[places].tolist())
            names.append((owner[:SHOWN], name[:SHOWN]))
        columns = tuple(np.asarray(column) for column in (minutes, functions, found))
        if self.functions is not None:
            totals = np.bincount(columns[1], columns[2], minlength=len(names))
            kept = np.isin(columns[1], np.argsort(-totals, kind="stable")[: self.functions])
            columns = tuple(column[kept] for column in columns)
        order = np.argsort(columns[0], kind="stable")
        return names, *(column[order] for column in columns)

    def _counts(self, file: Rows, given: list[str]) -> np.ndarray:
        try:
            counts = np.array(given, np.int64)
            if not len(counts) or counts.min() >= 0:
                return counts
        except (ValueError, OverflowError):
            pass
        return np.array([file.tokens(str(minute), count, 0) for minute, count in enumerate(given, 1)])
