"""Arrival times of requests: constant or random gaps with a rate curve, or the times of a trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, Tag, model_validator

from .fields import Strict, WorkloadError
from .request import NS
from .seeds import stream
from .trace import Csv

#: Requests that are made at a time. It is part of the definition of a workload, because it determines how random
#: numbers are drawn.
CHUNK = 8192


class Piece(NamedTuple):
    """A rate that changes linearly from `first` to `last` requests per second within `seconds`, which may be
    infinite.
    """

    seconds: float
    first: float
    last: float

    @property
    def requests(self) -> float:
        return self.seconds * (self.first + self.last) / 2 if self.first or self.last else 0.0


class LinearRate(Strict):
    """A curve through (second, requests/s) points, constant before the first and after the last."""

    curve: Literal["linear"]
    points: list[tuple[NonNegativeFloat, NonNegativeFloat]] = Field(min_length=1)

    @model_validator(mode="after")
    def _in_order(self) -> LinearRate:
        times = [time for time, _ in self.points]
        if times != sorted(times):
            raise ValueError(f"points are at the seconds {times}; put them in order of time")
        if not any(rate for _, rate in self.points):
            raise ValueError("every point has a rate of 0; give at least one a positive rate")
        return self

    def pieces(self) -> Iterator[Piece]:
        first, last = self.points[0], self.points[-1]
        if first[0] > 0:
            yield Piece(first[0], first[1], first[1])
        for (start, before), (end, after) in itertools.pairwise(self.points):
            if end > start:
                yield Piece(end - start, before, after)
        yield Piece(math.inf, last[1], last[1])


def _kind_of_rate(rate: Any) -> Any:
    return rate.get("curve") if isinstance(rate, dict) else getattr(rate, "curve", "number")


Rate = Annotated[
    Annotated[PositiveFloat, Tag("number")] | Annotated[LinearRate, Tag("linear")],
    Discriminator(
        _kind_of_rate,
        custom_error_type="rate",
        custom_error_message="it must be requests per second, or a table with the curve linear and its points",
    ),
]


class Renewal(Strict):
    """Exponential ("poisson") or equal ("constant") gaps with mean 1, in units of the rate curve's integral."""

    process: Literal["poisson", "constant"]
    rate: Rate = Field(description="requests per second, or a curve")

    def expected(self, duration: float) -> float:
        """Expected requests within `duration` seconds."""
        return integral(self._pieces(), duration)

    def _pieces(self) -> list[Piece]:
        if isinstance(self.rate, float | int):
            return [Piece(math.inf, self.rate, self.rate)]
        return list(self.rate.pieces())

    def times(self, seed: int, duration: float) -> Iterator[np.ndarray]:
        """Chunks of up to `CHUNK` arrival times, int64 nanoseconds, in order and before `duration` seconds."""
        rng, pieces = stream(seed, "arrivals"), self._pieces()
        # fixed point: sums are exact, so rounding does not depend on how the gaps are chunked
        reached = np.int64(0)
        while True:
            gaps = np.ones(CHUNK) if self.process == "constant" else rng.standard_exponential(CHUNK)
            due = reached + np.cumsum(np.rint(gaps * NS).astype(np.int64))
            reached = due[-1]
            found = seconds(pieces, due / NS, duration)
            if len(found):
                yield np.rint(found * NS).astype(np.int64)
            if len(found) < CHUNK:
                return


class ReplayArrivals(Strict):
    """The times of a trace, relative to its first; request i is row i."""

    process: Literal["replay"]
    trace: Csv

    def expected(self, duration: float) -> float:
        raise WorkloadError(
            "popularity: the number of requests of a replayed trace is not known in advance; "
            "set `requests`, or `adapters.count`"
        )

    def times(self, seed: int, duration: float) -> Iterator[np.ndarray]:
        """One chunk of arrival times, int64 nanoseconds, in order and before `duration` seconds."""
        found = np.array([row.arrival for row in self.trace.rows()])
        times = np.rint((found - found[0]) * NS).astype(np.int64)
        yield times[: int(np.searchsorted(times, duration * NS, side="left"))]


Arrivals = Annotated[Renewal | ReplayArrivals, Field(discriminator="process")]


def integral(pieces: Iterable[Piece], until: float) -> float:
    """Requests that are due within the first `until` seconds."""
    total = 0.0
    for piece in pieces:
        if piece.seconds >= until:
            last = piece.first + (piece.last - piece.first) * (until / piece.seconds)
            return total + until * (piece.first + last) / 2
        total += piece.requests
        until -= piece.seconds
    return total


def seconds(pieces: Sequence[Piece], due: np.ndarray, until: float) -> np.ndarray:
    """Times at which the curve's integral reaches `due`, ascending, float64; cut off after the last one before `until`.

    pieces: the last one never ends.
    """
    lengths = np.array([piece.seconds for piece in pieces])
    starts = np.concatenate(([0.0], np.cumsum(lengths[:-1])))
    dues = np.concatenate(([0.0], np.cumsum([piece.requests for piece in pieces[:-1]])))
    # if the rate is 0 several pieces begin at the same due: the request comes at the end of the pause
    index = np.maximum(np.searchsorted(dues, due, side="right") - 1, 0)
    first = np.array([piece.first for piece in pieces])[index]
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = (np.diff(np.array([piece[1:] for piece in pieces]))[:, 0] / lengths)[index]
        wanted = due - dues[index]
        root = np.sqrt(np.maximum(first * first + 2 * slope * wanted, 0.0))
        times = starts[index] + np.where(wanted > 0, 2 * wanted / (first + root), 0.0)
    return times[: int(np.searchsorted(times, until, side="left"))]
