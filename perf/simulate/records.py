"""Records of all served requests, as compact columns."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from ..report.table import spread


class Served(NamedTuple):
    """One request that was answered. Times in seconds.

    ttft, e2e: from arrival to the first and the last token. queue: from arrival to admission. cold: of e2e, what steps
    of its replica waited for adapters, its own or others'. tokens: of the answer.
    """

    arrival: float
    ttft: float
    e2e: float
    queue: float
    cold: float
    tokens: int
    replica: int = 0

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Records:
    """Columns of `Served`, 32 bytes a request, in the order in which requests ended.

    Nothing else grows with a run once its replicas have met the adapters. These are kept because percentiles are exact,
    also those of values that are computed from several columns, and over the requests that came after a warm-up: an
    hour at 340 requests/s takes 39 MB, and up to an eighth of that as room to grow.
    """

    _TYPES = {"arrival": "d", "ttft": "f", "e2e": "f", "queue": "f", "cold": "f", "tokens": "i", "replica": "i"}

    def __init__(self) -> None:
        self._columns = {name: array(code) for name, code in self._TYPES.items()}
        self._appends = tuple(column.append for column in self._columns.values())
        self.num_failed = 0

    def add(self, served: Served) -> None:
        for append, value in zip(self._appends, served, strict=True):
            append(value)

    def extend(self, other: Records) -> None:
        """Take over what another run recorded."""
        for name, column in self._columns.items():
            column.extend(other._columns[name])
        self.num_failed += other.num_failed

    def __len__(self) -> int:
        return len(self._columns["arrival"])

    def column(self, name: str) -> np.ndarray:
        """`[requests]` of `Served`'s fields or of `tpot`, `cold_share`, `time_per_token`."""
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
