"""One request of a workload."""

from __future__ import annotations

from typing import NamedTuple

#: Adapter index of the base model.
BASE = -1

NS = 1_000_000_000


class TraceRequest(NamedTuple):
    """One request. A workload is an iterator of these in order of arrival, ids counting up from 0."""

    id: int
    arrival: float
    """Seconds since the start of the workload."""
    adapter: str | None
    """None is the base model."""
    prompt_tokens: int
    """Length of the prompt."""
    output_tokens: int
    """Length of the completion, including the first token."""
    rank: int | None = None
    """The adapter's rank, None if unknown; 0 for the base model."""
    tenant: str | None = None
    """None if unknown."""
