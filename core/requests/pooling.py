"""Pooling requests: they sample no token, and return one vector of their prompt's final hidden states.

Tests: tests/core/test_pooling.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class PooledSum:
    """The sum of some tokens' hidden states: a chunk's share of a pooled vector."""

    values: np.ndarray
    """`[hidden]` float64."""
    count: int

    def plus(self, other: PooledSum | None) -> PooledSum:
        """The sum of the tokens of both."""
        return self if other is None else PooledSum(self.values + other.values, self.count + other.count)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.values).all())

    def mean(self) -> np.ndarray:
        """The pooled vector `[hidden]` float64."""
        return self.values / self.count


def to_bytes(vector: np.ndarray) -> bytes:
    """The values as float32, little-endian."""
    return vector.astype("<f4").tobytes()


def from_bytes(data: bytes) -> np.ndarray:
    """The float32 values of `to_bytes`; read only."""
    return np.frombuffer(data, "<f4")
