"""Records of all served requests, as compact columns."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from ..report.table import spread


class Served(NamedTuple):
    """One request that was answered. Times in seconds.

    ttft, e2e: from arrival to the first and the last token. queue: from arrival to admission. cold: of e2e, what steps
    of its replica waited for adapters, its own or others'. tokens: of the answer. slo, tenant, session: the request's.
    """

    arrival: float
    ttft: float
    e2e: float
    queue: float
    cold: float
    tokens: int
    replica: int = 0
    slo: str | None = None
    tenant: str | None = None
    session: str | None = None

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Records:
    """Columns of `Served`, 44 bytes a request, in the order in which requests ended.

    Nothing else grows with a run once its replicas have met the adapters. These are kept because percentiles are exact,
    also percentiles of values that are computed from several columns, and over the requests that came after a warm-up:
    an hour at 340 requests/s takes 54 MB, and up to an eighth of that as room to grow. Names are kept once.

    failures: arrival and service class of each request that was refused or ended with an error. num_moved: how often
    requests went on at another replica.
    """

    _TYPES = {"arrival": "d", "ttft": "f", "e2e": "f", "queue": "f", "cold": "f", "tokens": "i", "replica": "i"}
    _NAMED = ("slo", "tenant", "session")

    def __init__(self) -> None:
        self._columns = {name: array(code) for name, code in self._TYPES.items()}
        self._columns |= {name: array("i") for name in self._NAMED}
        self._appends = tuple(column.append for column in self._columns.values())
        self._numbers: dict[str | None, int] = {None: 0}  # of names
        self.failures: list[tuple[float, str | None]] = []
        self.num_moved = 0

    @property
    def num_failed(self) -> int:
        return len(self.failures)

    def add(self, served: Served) -> None:
        numbers = self._numbers
        *values, slo, tenant, session = served
        for append, value in zip(self._appends, values, strict=False):
            append(value)
        for append, name in zip(self._appends[len(values) :], (slo, tenant, session), strict=True):
            append(numbers.setdefault(name, len(numbers)))

    def extend(self, other: Records) -> None:
        """Take over what another run recorded."""
        names = list(other._numbers)
        for name, column in self._columns.items():
            found = other._columns[name]
            if name in self._NAMED:
                column.extend([self._numbers.setdefault(names[each], len(self._numbers)) for each in found])
            else:
                column.extend(found)
        self.failures += other.failures
        self.num_moved += other.num_moved

    def __len__(self) -> int:
        return len(self._columns["arrival"])

    def column(self, name: str) -> np.ndarray:
        """`[requests]` of `Served`'s fields or of `tpot`, `cold_share`, `time_per_token`; names as objects."""
        if name in self._NAMED:
            return np.array(list(self._numbers), object)[np.asarray(self._columns[name])]
        if name == "tpot":
            tokens = self.column("tokens")
            spread = self.column("e2e") - self.column("ttft")
            return np.divide(spread, tokens - 1, out=np.zeros(len(tokens)), where=tokens > 1)
        if name == "cold_share":
            return self.column("cold") / self.column("e2e")
        if name == "time_per_token":
            return self.column("e2e") / self.column("tokens")
        return np.asarray(self._columns[name])

    def summary(self) -> dict[str, Any]:
        """Mean and percentiles of the times, in seconds; tokens per second from the first arrival to the last end."""
        if not len(self):
            return {"requests": 0, "failed": self.num_failed}
        arrival, tokens = self.column("arrival"), self.column("tokens")
        seconds = float((arrival + self.column("e2e")).max() - arrival.min())
        found: dict[str, Any] = {
            "requests": len(self),
            "failed": self.num_failed,
            "seconds": seconds,
            "tokens_per_second": float(tokens.sum()) / seconds,
            "cold_share": float(self.column("cold_share").mean()),
        }
        for name in ("ttft", "tpot", "e2e", "queue"):
            values = self.column(name)
            if name == "tpot":
                values = values[tokens > 1]
            found[name] = spread(values if len(values) else np.zeros(1))
        return found
