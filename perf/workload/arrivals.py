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
from .errors import TraceError, WorkloadError
from .model import Strict
from .request import NS
from .seeds import stream
from .traces import TraceSource

#: Requests that are made at a time. Part of the definition of a workload: it decides how random numbers are drawn.
CHUNK = 8192

#: Linear pieces that a period of a sinusoid is made of: the rate is within 1e-5 of the amplitude.
_PIECES_PER_PERIOD = 720


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

    def pieces(self, seed: int) -> Iterator[rates.Piece]:
        first, last = self.points[0], self.points[-1]
        if first[0] > 0:
            yield rates.Piece(first[0], first[1], first[1])
        for (start, before), (end, after) in itertools.pairwise(self.points):
            if end > start:
                yield rates.Piece(end - start, before, after)
        yield rates.Piece(math.inf, last[1], last[1])


class SinusoidRate(Strict):
    """mean + amplitude · sin(2π · (t/period + phase)) requests/s, never below 0. period in seconds."""

    curve: Literal["sinusoid"]
    mean: PositiveFloat
    amplitude: NonNegativeFloat
    period: PositiveFloat
    phase: float = Field(default=0.0, description="share of a period; -0.25 begins at the lowest rate")

    def pieces(self, seed: int) -> Iterator[rates.Piece]:
        angles = 2 * math.pi * (np.arange(_PIECES_PER_PERIOD + 1) / _PIECES_PER_PERIOD + self.phase)
        points = np.maximum(self.mean + self.amplitude * np.sin(angles), 0.0).tolist()
        while True:
            for before, after in itertools.pairwise(points):
                yield rates.Piece(self.period / _PIECES_PER_PERIOD, before, after)


class OnOffRate(Strict):
    """Two rates by turns, for exponentially distributed times of the given means (Markov-modulated)."""

    curve: Literal["on_off"]
    on_rate: PositiveFloat
    off_rate: NonNegativeFloat = 0.0
    on_seconds: PositiveFloat
    off_seconds: PositiveFloat

    @property
    def mean(self) -> float:
        total = self.on_seconds + self.off_seconds
        return (self.on_rate * self.on_seconds + self.off_rate * self.off_seconds) / total

    def pieces(self, seed: int) -> Iterator[rates.Piece]:
        """The first state is drawn by the share of time that each has."""
        rng = stream(seed, "rate")
        on = rng.random() < self.on_seconds / (self.on_seconds + self.off_seconds)
        while True:
            seconds = float(rng.standard_exponential()) * (self.on_seconds if on else self.off_seconds)
            rate = self.on_rate if on else self.off_rate
            yield rates.Piece(seconds, rate, rate)
            on = not on


def _kind_of_rate(rate: Any) -> Any:
    return rate.get("curve") if isinstance(rate, dict) else getattr(rate, "curve", "number")


Rate = Annotated[
    Annotated[PositiveFloat, Tag("number")]
    | Annotated[LinearRate, Tag("linear")]
    | Annotated[SinusoidRate, Tag("sinusoid")]
    | Annotated[OnOffRate, Tag("on_off")],
    Discriminator(
        _kind_of_rate,
        custom_error_type="rate",
        custom_error_message="it must be requests per second, or a table with a curve of linear, sinusoid or on_off",
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
        if isinstance(self.rate, float):
            return self.rate * duration
        if isinstance(self.rate, OnOffRate):
            return self.rate.mean * duration
        return rates.integral(self.rate.pieces(0), duration)

    def times(self, seed: int, duration: float) -> Iterator[np.ndarray]:
        """Chunks of up to `CHUNK` arrival times, int64 nanoseconds, in order and before `duration` seconds."""
        rng = stream(seed, "arrivals")
        pieces = (
            iter([rates.Piece(math.inf, self.rate, self.rate)])
            if isinstance(self.rate, float)
            else self.rate.pieces(seed)
        )
        clock = rates.Clock(pieces)
        # fixed point: sums are exact, so rounding does not depend on how the gaps are chunked
        reached = np.int64(0)
        while True:
            due = reached + np.cumsum(np.rint(self.gaps(rng, CHUNK) * NS).astype(np.int64))
            reached = due[-1]
            seconds = clock.seconds(due / NS, duration)
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
    others anywhere before the next row. Only with a rate_scale of 1 is request i row i of the trace. repeat: begin anew
    when the trace ends.
    """

    process: Literal["replay"]
    trace: TraceSource
    time_scale: PositiveFloat = 1.0
    rate_scale: PositiveFloat = 1.0
    repeat: bool = False

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
        for times in self._rounds(seed):
            yield (rows := np.concatenate((last, times)))
            last = rows[-1:]
        yield np.repeat(last, 2)

    def _rounds(self, seed: int) -> Iterator[np.ndarray]:
        start: float | None = None
        shift = 0
        while True:
            rows, latest = 0, shift
            for chunk in self.trace.columns("arrival", seed=seed, size=CHUNK):
                seconds = np.array(chunk["arrival"])
                start = float(seconds[0]) if start is None else start
                times = np.rint((seconds - start) * (self.time_scale * NS)).astype(np.int64) + shift
                latest, rows = int(times[-1]), rows + len(times)
                yield times
            if not self.repeat:
                return
            if latest == shift:
                mend = "leave repeat out, or give a longer trace"
                raise TraceError(self.trace.path, None, f"{rows} rows at one time cannot be repeated", mend)
            # the next round begins a mean gap after the last row
            shift = latest + max(1, round((latest - shift) / (rows - 1)))

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
