"""Rendezvous hashing of adapters to replicas (Thaler and Ravishankar, 1998)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd: Knuth's multiplicative hashing, of 64 bits
_MAX_NAMES = 1 << 16


@lru_cache(_MAX_NAMES)
def key_of(name: str) -> int:
    """64 bits that are the same for a name in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def weights(adapter: str, replicas: Iterable[int]) -> list[int]:
    """Return the weights of replicas, by their keys, for an adapter; the highest wins. A replica that goes moves only
    its own adapters.
    """
    key = key_of(adapter)
    return [(key ^ other) * _FACTOR & _MASK for other in replicas]
