"""Arrival times of requests: renewal processes under a rate curve, or the times of a trace."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, Tag, model_validator

from . import rates
from .errors import WorkloadError
from .model import Strict
from .request import NS
from .seeds import stream
from .traces import TraceSource

#: Requests that are made at a time. Part of the definition of a workload: it decides how random numbers are drawn.
CHUNK = 8192


class LinearRate(Strict):
    """Through (second, requests/s) points; before the first and after the last the rate holds."""

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

    def pieces(self) -> Iterator[rates.Piece]:
        first, last = self.points[0], self.points[-1]
        if first[0] > 0:
            yield rates.Piece(first[0], first[1], first[1])
        for (start, before), (end, after) in itertools.pairwise(self.points):
            if end > start:
                yield rates.Piece(end - start, before, after)
        yield rates.Piece(math.inf, last[1], last[1])


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
    """Independent gaps of one distribution with mean 1, in units of the rate curve's integral.

    So the rate is the curve's at all times, and `cv` is the gaps' coefficient of variation where the rate is constant.
    """

    rate: Rate = Field(description="requests per second, or a curve")

    @abstractmethod
    def gaps(self, rng: np.random.Generator, count: int) -> np.ndarray: ...

    def expected(self, duration: float) -> float:
        """Requests to expect within `duration` seconds."""
        return rates.integral(self._pieces(), duration)

    def _pieces(self) -> list[rates.Piece]:
        if isinstance(self.rate, float):
            return [rates.Piece(math.inf, self.rate, self.rate)]
        return list(self.rate.pieces())

    def times(self, seed: int, duration: float) -> Iterator[np.ndarray]:
        """Chunks of up to `CHUNK` arrival times, int64 nanoseconds, in order and before `duration` seconds."""
        rng, pieces = stream(seed, "arrivals"), self._pieces()
        # fixed point: sums are exact, so rounding does not depend on how the gaps are chunked
        reached = np.int64(0)
        while True:
            due = reached + np.cumsum(np.rint(self.gaps(rng, CHUNK) * NS).astype(np.int64))
            reached = due[-1]
            seconds = rates.seconds(pieces, due / NS, duration)
            if len(seconds):
                yield np.rint(seconds * NS).astype(np.int64)
            if len(seconds) < CHUNK:
                return


class PlainArrivals(Renewal):
    """Exponential or equal gaps."""

    process: Literal["poisson", "constant"]

    def gaps(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.ones(count) if self.process == "constant" else rng.standard_exponential(count)


class GammaArrivals(Renewal):
    """Gamma gaps with coefficient of variation `cv`: above 1 burstier than Poisson, below 1 more regular."""

    process: Literal["gamma"]
    cv: PositiveFloat

    def gaps(self, rng: np.random.Generator, count: int) -> np.ndarray:
        shape = self.cv**-2
        return rng.standard_gamma(shape, count) / shape


class ReplayArrivals(Strict):
    """The times of a trace, counted from its first.

    time_scale: multiplies times, so that 0.5 doubles the rate and halves the length of bursts. rate_scale: multiplies
    the rate and leaves the course of time: a row becomes this many requests on average, the first at its time and the
    others anywhere before the next row. Only with a rate_scale of 1 is request i row i of the trace.
    """

    process: Literal["replay"]
    trace: TraceSource
    time_scale: PositiveFloat = 1.0
    rate_scale: PositiveFloat = 1.0

    def expected(self, duration: float) -> float:
        raise WorkloadError(
            "popularity: the number of requests of a replayed trace is not known in advance; "
            "set `requests`, or `adapters.count`"
        )

    def times(self, seed: int, duration: float) -> Iterator[np.ndarray]:
        """Chunks of arrival times, int64 nanoseconds, in order and before `duration` seconds."""
        rng, end = stream(seed, "arrivals"), duration * NS
        for rows in self._rows(seed):
            made = self._copies(rows, rng)
            kept = made[: int(np.searchsorted(made, end, side="left"))]
            if len(kept):
                yield kept
            if len(kept) < len(made):
                return

    def _rows(self, seed: int) -> Iterator[np.ndarray]:
        """Chunks of the rows' times, each followed by the first of the next one: a row's copies reach to the next."""
        last: np.ndarray = np.empty(0, np.int64)
        for times in self._times(seed):
            yield (rows := np.concatenate((last, times)))
            last = rows[-1:]
        yield np.repeat(last, 2)

    def _times(self, seed: int) -> Iterator[np.ndarray]:
        start: float | None = None
        for chunk in self.trace.columns("arrival", seed=seed, size=CHUNK):
            seconds = np.array(chunk["arrival"])
            start = float(seconds[0]) if start is None else start
            yield np.rint((seconds - start) * (self.time_scale * NS)).astype(np.int64)

    def _copies(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Requests for all rows but the last, which only tells where the copies of the one before it end."""
        first, gaps = rows[:-1], np.diff(rows)
        if self.rate_scale == 1.0:
            return first
        whole = math.floor(self.rate_scale)
        counts = whole + (rng.random(len(first)) < self.rate_scale - whole)
        spread = rng.random(int(counts.sum()))
        ends = np.cumsum(counts)
        spread[(ends - counts)[counts > 0]] = 0.0
        return np.sort(np.repeat(first, counts) + (spread * np.repeat(gaps, counts)).astype(np.int64))


Arrivals = Annotated[PlainArrivals | GammaArrivals | ReplayArrivals, Field(discriminator="process")]
