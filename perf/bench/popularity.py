"""Distribution of a batch of requests over adapters (Punica §7: distinct, uniform, skewed, identical)."""

from __future__ import annotations

from ..workload.popularity import Uniform, Zipf

POPULARITIES = ("distinct", "uniform", "zipf-1.5", "identical")


def segment_lengths(popularity: str, requests: int) -> list[int]:
    """Number of `requests` for each adapter, most popular first, distributed like workloads of that name."""
    law = {"uniform": Uniform(kind="uniform"), "zipf-1.5": Zipf(kind="zipf", alpha=1.5)}.get(popularity)
    if law is None:
        return [requests] if popularity == "identical" else [1] * requests
    return law.counts(requests, None).tolist()
