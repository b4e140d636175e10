"""One request of a workload, and many of them as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np

#: Adapter index that stands for the base model.
BASE = -1

NS = 1_000_000_000


class TraceRequest(NamedTuple):
    """One request. A workload is an iterator of these in order of arrival, ids counting up from 0.

    arrival: seconds since the start of the workload. adapter: None is the base model. prompt_tokens: length of the
    prompt. output_tokens: length of the answer, the first token included. rank: the adapter's, None if unknown; 0 for
    the base model. slo: name of the service class. hash_ids: one id for each `hash_block_tokens` tokens of the prompt,
    the last block possibly partial; prompts share a prefix as far as their leading ids are equal (the convention of
    Mooncake's traces). Empty where the trace has none. tenant: None if unknown. session: the conversation that the
    request is a turn of; None if it is of none.
    """

    id: int
    arrival: float
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    rank: int | None = None
    slo: str | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 0
    tenant: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Consecutive requests as columns of one length n; iterating it gives `TraceRequest`s.

    first_id: id of the first. arrival_ns: int64 [n], nanoseconds. adapter: int64 [n], index for `name`, `BASE` for the
    base model. rank: int32 [n], −1 unknown. prompt_tokens, output_tokens: int64 [n]. name: name of the adapter of an
    index. slo, tenant, session: a name per request, or None for none at all. hash_ids: a tuple of ids per request, or
    None.
    """

    first_id: int
    arrival_ns: np.ndarray
    adapter: np.ndarray
    rank: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    name: Callable[[int], str]
    slo: Sequence[str | None] | None = None
    hash_ids: Sequence[tuple[int, ...]] | None = None
    hash_block_tokens: int = 0
    tenant: Sequence[str | None] | None = None
    session: Sequence[str | None] | None = None

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def arrival(self) -> np.ndarray:
        """Seconds, float64 [n]."""
        return self.arrival_ns / NS

    def names(self) -> list[str | None]:
        """Name of each request's adapter; each distinct one is made once."""
        distinct, inverse = np.unique(self.adapter, return_inverse=True)
        table = [None if index == BASE else self.name(index) for index in distinct.tolist()]
        return [table[index] for index in inverse.tolist()]

    def __iter__(self) -> Iterator[TraceRequest]:
        columns = zip(
            range(self.first_id, self.first_id + len(self)), self.arrival.tolist(), self.names(),
            self.prompt_tokens.tolist(), self.output_tokens.tolist(),
            [None if rank < 0 else rank for rank in self.rank.tolist()],
            repeat(None) if self.slo is None else self.slo,
            repeat(()) if self.hash_ids is None else self.hash_ids, repeat(self.hash_block_tokens),
            repeat(None) if self.tenant is None else self.tenant,
            repeat(None) if self.session is None else self.session, strict=False,
        )  # fmt: skip
        return map(TraceRequest._make, columns)
