"""Spread of a batch of requests over adapters (Punica §7: distinct, uniform, skewed, identical)."""

from __future__ import annotations

import math

POPULARITIES = ("distinct", "uniform", "zipf-1.5", "identical")
_ALPHA = 1.5


def segment_lengths(popularity: str, requests: int) -> list[int]:
    """Number of `requests` that each adapter has, the most popular first.

    distinct: one each. uniform: ⌈√n⌉ adapters, as even as can be. zipf-1.5: an adapter has 1.5 times as many as the
    next, rounded down, from 1 upwards until all are given out (Punica's Zipf-α). identical: one adapter has all.
    """
    if requests < 1:
        raise ValueError(f"requests is {requests}; at least 1 is needed")
    match popularity:
        case "distinct":
            return [1] * requests
        case "uniform":
            count = math.isqrt(requests - 1) + 1
            return [requests // count + (index < requests % count) for index in range(count)]
        case "zipf-1.5":
            return _zipf(requests)
        case "identical":
            return [requests]
    raise ValueError(f"popularity is {popularity!r}; one of {', '.join(POPULARITIES)}")


def _zipf(requests: int) -> list[int]:
    lengths: list[int] = []
    size = 1.0
    while sum(lengths) + int(size) < requests:
        lengths.append(int(size))
        size *= _ALPHA
    lengths.append(requests - sum(lengths))
    return sorted(lengths, reverse=True)
