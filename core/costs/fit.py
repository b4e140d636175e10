"""Weighted least squares with non-negative coefficients: from profiled steps to a cost model's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class FitError(ValueError):
    """Too few or unusable samples; the text names the missing ones."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients by term, and how well they explain the samples.

    r2: share of the seconds' variance that is explained. mean_error: mean |predicted - measured| / measured.
    """

    terms: dict[str, float]
    r2: float
    mean_error: float
    num_samples: int


def fit(
    terms: Sequence[str], rows: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] = ()
) -> Fit:
    """The non-negative coefficients that minimise the sum of squared errors over seconds.

    Long steps vary more than short ones: a sample's weight is 1 / its seconds, so that neither decides alone. R² is
    that of the plain errors.
    rows: `[samples, len(terms)]`, a sample's value of each term; a constant term is 1 in every row. known: the part of
    each sample's seconds that other terms explain; it may be more than the seconds, as both are measured.
    Raises FitError unless there are more samples than terms and they are finite.
    """
    if len(rows) <= len(terms):
        raise FitError(f"{len(rows)} samples can't determine {len(terms)} terms ({', '.join(terms)}); measure more")
    matrix, target = np.asarray(rows, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if not (np.isfinite(matrix).all() and np.isfinite(target).all() and (target > 0).all()):
        raise FitError("samples must be finite, and take more than 0 seconds")
    weights = 1.0 / np.sqrt(target)
    given = np.asarray(known, dtype=np.float64) if len(known) else np.zeros_like(target)
    weighted = matrix * weights[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0  # a term that no sample has stays 0
    found = _nnls(weighted / scale, (target - given) * weights) / scale
    predicted = given + matrix @ found
    spread = float(((target - target.mean()) ** 2).sum())
    r2 = 1.0 - float(((target - predicted) ** 2).sum()) / spread if spread else 1.0
    error = float((np.abs(predicted - target) / target).mean())
    return Fit(dict(zip(terms, found.tolist(), strict=True)), r2, error, len(target))


def _nnls(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Lawson and Hanson's active set method. matrix: `[samples, terms]`, columns of similar size."""
    count = matrix.shape[1]
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ target).max()))
    for _ in range(10 * count):
        gradient = matrix.T @ (target - matrix @ x)
        if free.all() or (gradient[~free] <= tolerance).all():
            break
        free[np.flatnonzero(~free)[gradient[~free].argmax()]] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                x = trial
                break
            step = (x[below] / (x[below] - trial[below])).min()
            x = x + step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
    return x
