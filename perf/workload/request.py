"""One request of a workload."""

from __future__ import annotations

from typing import NamedTuple

#: Adapter index that stands for the base model.
BASE = -1

NS = 1_000_000_000


class TraceRequest(NamedTuple):
    """One request. A workload is an iterator of these in order of arrival, ids counting up from 0.

    arrival: seconds since the start of the workload. adapter: None is the base model. prompt_tokens: length of the
    prompt. output_tokens: length of the answer, the first token included. rank: the adapter's, None if unknown; 0 for
    the base model. tenant: None if unknown.
    """

    id: int
    arrival: float
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    rank: int | None = None
    tenant: str | None = None
