"""Request rates over time, and the way from counted requests back to times.

A curve is a sequence of linear pieces of requests per second. Arrival processes live in operational time, in which one
request is due per unit; `seconds` maps that to seconds through the inverse of the curve's integral.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def seconds(pieces: Sequence[Piece], due: np.ndarray, until: float) -> np.ndarray:
    """Times at which the curve's integral reaches `due`, ascending, float64; cut off after the last one before `until`.

    pieces: the last one never ends.
    """
    lengths = np.array([piece.seconds for piece in pieces])
    starts = np.concatenate(([0.0], np.cumsum(lengths[:-1])))
    dues = np.concatenate(([0.0], np.cumsum([piece.requests for piece in pieces[:-1]])))
    # where the rate is 0 several pieces begin at the same due: the request comes at the end of the pause
    index = np.maximum(np.searchsorted(dues, due, side="right") - 1, 0)
    first = np.array([piece.first for piece in pieces])[index]
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = (np.diff(np.array([piece[1:] for piece in pieces]))[:, 0] / lengths)[index]
        wanted = due - dues[index]
        root = np.sqrt(np.maximum(first * first + 2 * slope * wanted, 0.0))
        times = starts[index] + np.where(wanted > 0, 2 * wanted / (first + root), 0.0)
    return times[: int(np.searchsorted(times, until, side="left"))]
