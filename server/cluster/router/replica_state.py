"""Requests and replicas as routing policies see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol


class Routed(Protocol):
    """A request as a router sees it. adapter: None is the base model, of rank 0."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def rank(self) -> int | None: ...


@dataclass(slots=True)
class ReplicaState:
    """Load of one replica; its owner keeps it up to date.

    max_num_seqs: most requests in one step. num_requests: running and waiting; num_waiting: of these, how many wait
    for their prefill. ranks: how many of the requests have which rank, 0 for the base model;
    num_with_adapter, sum_ranks and max_rank follow from it. pending_ranks: the same of the waiting ones;
    pending_tokens: their prompt tokens; pending_token_ranks: the sum over these tokens of their adapter's rank;
    pending_max_rank: the largest of these ranks. kv_tokens: tokens in the KV cache of the running requests;
    longest_tokens: of the one that has most.
    free_tokens: tokens that find room for their KV, in free pages and in cached pages that no request uses.
    resident: names of the adapters in the arena; on_host: of adapters that need not be read from the disk.
    disk_seconds, link_seconds: until a read, or a copy to the device, that were asked for now would begin.
    name: the same for a replica that was restarted.
    """

    max_num_seqs: int
    num_requests: int = 0
    num_waiting: int = 0
    ranks: Counter[int] = field(default_factory=Counter)
    num_with_adapter: int = 0
    sum_ranks: int = 0
    max_rank: int = 0
    pending_ranks: Counter[int] = field(default_factory=Counter)
    pending_tokens: int = 0
    pending_token_ranks: int = 0
    pending_max_rank: int = 0
    kv_tokens: int = 0
    longest_tokens: int = 0
    free_tokens: int = 1 << 40
    resident: Container[str] = frozenset()
    on_host: Container[str] = frozenset()
    disk_seconds: float = 0.0
    link_seconds: float = 0.0
    name: str = ""

    def add(self, rank: int) -> None:
        """A request came."""
        self.num_requests += 1
        self.ranks[rank] += 1
        self.sum_ranks += rank
        self.num_with_adapter += rank > 0
        if rank > self.max_rank:
            self.max_rank = rank

    def remove(self, rank: int) -> None:
        """A request that had come is gone."""
        self.num_requests -= 1
        self.sum_ranks -= rank
        self.num_with_adapter -= rank > 0
        if _discount(self.ranks, rank) and rank == self.max_rank:
            self.max_rank = max(self.ranks, default=0)

    def set_waiting(self, waiting: Iterable[tuple[int, int]]) -> None:
        """Prompt tokens and rank of each request that waits."""
        self.num_waiting = self.pending_tokens = self.pending_token_ranks = self.pending_max_rank = 0
        self.pending_ranks.clear()
        for tokens, rank in waiting:
            self.add_waiting(tokens, rank)

    def add_waiting(self, tokens: int, rank: int) -> None:
        """One more of the requests waits."""
        self.num_waiting += 1
        self.pending_ranks[rank] += 1
        self.pending_tokens += tokens
        self.pending_token_ranks += tokens * rank
        if rank > self.pending_max_rank:
            self.pending_max_rank = rank

    def remove_waiting(self, tokens: int, rank: int) -> None:
        """One of the requests waits no more."""
        self.num_waiting -= 1
        self.pending_tokens -= tokens
        self.pending_token_ranks -= tokens * rank
        if _discount(self.pending_ranks, rank) and rank == self.pending_max_rank:
            self.pending_max_rank = max(self.pending_ranks, default=0)

    def copy(self) -> ReplicaState:
        """Return the state as it is now, but for `resident` and `on_host`, which go on telling what is there."""
        return replace(self, ranks=self.ranks.copy(), pending_ranks=self.pending_ranks.copy())

    def has_room(self, request: Routed) -> bool:
        """True if a slot and pages for the prompts of the request and of the waiting requests are left."""
        return self.num_requests < self.max_num_seqs and self.pending_tokens + request.prompt_tokens <= self.free_tokens


def _discount(counts: Counter[int], rank: int) -> bool:
    """Count one less; True if it was the last one of its rank."""
    counts[rank] -= 1
    if counts[rank]:
        return False
    del counts[rank]
    return True
