"""TEMP"""
from __future__ import annotations
import math
from dataclasses import dataclass
from statistics import median
from collections.abc import Iterable

@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        rank = interval(len(ordered))
        return cls(_rounded(median(ordered)), _rounded(ordered[rank]), _rounded(ordered[-1 - rank]))

    def to_json(self) -> list[float]:
        return [self.median, self.low, self.high]


def _rounded(v): return float(f"{v:.7g}")
def interval(count):
    outside, best = 0.0, 0
    for rank in range(count // 2):
        outside += 2 * math.comb(count, rank) * 0.5**count
        if 1 - outside >= 0.95:
            best = rank
    return best
