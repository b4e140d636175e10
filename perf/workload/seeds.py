"""Independent random streams from one seed, one for each part of a workload."""

from __future__ import annotations

import zlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def stream(seed: int, part: str) -> np.random.Generator:
    """The random stream of a part. Other draws from one part do not affect the others."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, part)))


def hashed_uniform(seed: int, part: str, index: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for every index ≥ 0, float64: a pure function of the index, without a table (SplitMix64)."""
    start = _sequence(seed, part).generate_state(1, np.uint64)[0]
    with np.errstate(over="ignore"):
        mixed = start + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX2
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) * 2.0**-53


def _sequence(seed: int, part: str) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(part.encode()),))
