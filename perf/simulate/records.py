"""Records of all served requests, as compact columns."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np


class Served(NamedTuple):
    """One completed request. Times in seconds."""

    arrival: float
    ttft: float
    e2e: float
    """From arrival to the first and the last token."""
    queue: float
    """From arrival to admission."""
    cold: float
    """Part of e2e in which steps of its replica waited for adapters, its own or others'."""
    tokens: int
    """Tokens of the completion."""
    replica: int = 0
    tenant: str | None = None
    """The request's."""


class Records:
    """Columns of `Served`, some 40 bytes a request, in the order in which requests ended.

    Nothing else grows with a run once its replicas have seen the adapters. The columns are kept to make percentiles
    exact, including those of values computed from several columns, and over the requests after a warm-up: an hour at
    340 requests/s takes 54 MB, and up to an eighth of that as room to grow.

    failures: arrival of each request that was refused or ended with an error. num_moved: number of moves to another
    replica.
    """

    _TYPES = {"arrival": "d", "ttft": "f", "e2e": "f", "queue": "f", "cold": "f", "tokens": "i", "replica": "i"}

    def __init__(self) -> None:
        self._columns = {name: array(code) for name, code in self._TYPES.items()}
        self._tenants: list[str | None] = []
        self._appends = *(column.append for column in self._columns.values()), self._tenants.append
        self.failures: list[float] = []
        self.num_moved = 0

    @property
    def num_failed(self) -> int:
        return len(self.failures)

    def add(self, served: Served) -> None:
        for append, value in zip(self._appends, served, strict=True):
            append(value)  # pyright: ignore[reportArgumentType] of a column, its own type

    def __len__(self) -> int:
        return len(self._tenants)

    def column(self, name: str) -> np.ndarray:
        """`[requests]` of `Served`'s fields or of `tpot`, `cold_share`, `time_per_token`; tenants as objects."""
        if name == "tenant":
            return np.array(self._tenants, object)
        if name == "tpot":  # seconds per token after the first; 0 for a completion of one token
            tokens = self.column("tokens")
            spread = self.column("e2e") - self.column("ttft")
            return np.divide(spread, tokens - 1, out=np.zeros(len(tokens)), where=tokens > 1)
        if name == "cold_share":
            return self.column("cold") / self.column("e2e")
        if name == "time_per_token":
            return self.column("e2e") / self.column("tokens")
        return np.asarray(self._columns[name])
