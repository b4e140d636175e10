"""Request rates over time, and the way from counted requests back to times.

A curve is a sequence of linear pieces of requests per second. Arrival processes live in operational time, in which one
request is due per unit; `Clock` maps that to seconds through the inverse of the curve's integral.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """A rate that goes linearly from `first` to `last` requests per second within `seconds`, which may be infinite."""

    seconds: float
    first: float
    last: float

    @property
    def requests(self) -> float:
        return self.seconds * (self.first + self.last) / 2 if self.first or self.last else 0.0


def integral(pieces: Iterable[Piece], seconds: float) -> float:
    """Requests that are due within the first `seconds`."""
    total = 0.0
    for piece in pieces:
        if piece.seconds >= seconds:
            last = piece.first + (piece.last - piece.first) * (seconds / piece.seconds)
            return total + seconds * (piece.first + last) / 2
        total += piece.requests
        seconds -= piece.seconds
    return total


class Clock:
    """Maps operational time, given in ascending order, to seconds. Holds a few pieces at a time."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._ended = False
        self._start = 0.0
        self._due = 0.0
        self._held: list[Piece] = []

    def seconds(self, due: np.ndarray, until: float) -> np.ndarray:
        """Times at which the curve's integral reaches `due`, float64; cut off after the last one before `until`."""
        self._hold(float(due[-1]), until)
        held = self._held
        lengths = np.array([piece.seconds for piece in held])
        starts = self._start + np.concatenate(([0.0], np.cumsum(lengths[:-1])))
        dues = self._due + np.concatenate(([0.0], np.cumsum([piece.requests for piece in held[:-1]])))
        # where the rate is 0 several pieces begin at the same due: the request comes at the end of the pause
        index = np.maximum(np.searchsorted(dues, due, side="right") - 1, 0)
        first = np.array([piece.first for piece in held])[index]
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = (np.diff(np.array([piece[1:] for piece in held]))[:, 0] / lengths)[index]
            wanted = due - dues[index]
            root = np.sqrt(np.maximum(first * first + 2 * slope * wanted, 0.0))
            times = starts[index] + np.where(wanted > 0, 2 * wanted / (first + root), 0.0)
        self._drop(int(index[-1]))
        return times[: int(np.searchsorted(times, until, side="left"))]

    def _hold(self, due: float, until: float) -> None:
        reached = self._due + sum(piece.requests for piece in self._held)
        seconds = self._start + sum(piece.seconds for piece in self._held)
        while reached <= due and seconds < until and not self._ended:
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
                break
            self._held.append(piece)
            reached += piece.requests
            seconds += piece.seconds
        if reached <= due:
            # the curve ends, or the workload does, before these are due
            self._held.append(Piece(math.inf, 0.0, 0.0))
            self._ended = True

    def _drop(self, count: int) -> None:
        for piece in self._held[:count]:
            self._start += piece.seconds
            self._due += piece.requests
        del self._held[:count]
