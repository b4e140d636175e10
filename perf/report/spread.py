"""Distribution of measured values in a few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

PERCENTILES = (50, 90, 99)


def spread(values: Iterable[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, float] | None:
    """Mean, percentiles and extremes; None of nothing.

    Percentiles interpolate linearly between order statistics, as numpy's default does.
    """
    found = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)
    if not len(found):
        return None
    marks = np.percentile(found, percentiles).tolist()
    named = {f"p{percentile:g}": mark for percentile, mark in zip(percentiles, marks, strict=True)}
    return {"mean": float(found.mean()), **named, "min": float(found.min()), "max": float(found.max())}
