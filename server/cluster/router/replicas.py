"""Requests and replicas as routing policies see them.

Tests: tests/server/cluster/router/test_router.py
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd: Knuth's multiplicative hashing, of 64 bits
_MAX_NAMES = 1 << 16


@lru_cache(_MAX_NAMES)
def key_of(name: str) -> int:
    """64 bits that are the same for a name in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def weights(adapter: str, replicas: Iterable[int]) -> list[int]:
    """Return the weights of replicas, by their keys, for an adapter; the highest wins. If a replica is removed, only
    its own adapters move.
    """
    key = key_of(adapter)
    return [(key ^ other) * _FACTOR & _MASK for other in replicas]


class Holders:
    """Names of the replicas that hold each adapter, kept up to date one change at a time."""

    def __init__(self) -> None:
        self._replicas: dict[str, list[str]] = {}

    def of(self, adapter: str) -> Sequence[str]:
        """Return the replicas that hold an adapter, in any order."""
        return self._replicas.get(adapter, ())

    def add(self, replica: str, adapters: Iterable[str]) -> None:
        """A replica now holds these, which it did not before."""
        for adapter in adapters:
            self._replicas.setdefault(adapter, []).append(replica)

    def remove(self, replica: str, adapters: Iterable[str]) -> None:
        """A replica no longer holds these."""
        for adapter in adapters:
            left = self._replicas[adapter]
            left.remove(replica)
            if not left:
                del self._replicas[adapter]


class Routed(Protocol):
    """A request in the form that routers take. adapter: None is the base model, of rank 0."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def rank(self) -> int | None: ...


@dataclass(slots=True)
class ReplicaState:
    """Load of one replica; its owner keeps it up to date."""

    max_num_seqs: int
    """Most requests in one step."""
    num_requests: int = 0
    """Requests, running and waiting."""
    num_waiting: int = 0
    """Number of these that wait for their prefill."""
    ranks: Counter[int] = field(default_factory=Counter)
    """Number of requests by rank, 0 for the base model; num_with_adapter, sum_ranks and max_rank follow from it."""
    num_with_adapter: int = 0
    sum_ranks: int = 0
    max_rank: int = 0
    pending_ranks: Counter[int] = field(default_factory=Counter)
    """The same for the waiting ones."""
    pending_tokens: int = 0
    """Prompt tokens of the waiting requests."""
    pending_token_ranks: int = 0
    """The sum over these tokens of their adapter's rank."""
    pending_max_rank: int = 0
    """The largest of these ranks."""
    kv_tokens: int = 0
    """Tokens in the KV cache of the running requests."""
    longest_tokens: int = 0
    """KV tokens of the longest running request."""
    free_tokens: int = 1 << 40
    """Tokens whose KV would fit into free pages and into cached pages that no request uses."""
    resident: Container[str] = frozenset()
    """Names of resident adapters."""
    on_host: Container[str] = frozenset()
    """Names of adapters in host memory, which need not be read from the disk."""
    disk_seconds: float = 0.0
    link_seconds: float = 0.0
    """Seconds until a read, or a copy to the device, that was requested now would begin."""
    name: str = ""
    """The same for a replica that was restarted."""

    def add(self, rank: int) -> None:
        """A request came."""
        self.num_requests += 1
        self.ranks[rank] += 1
        self.sum_ranks += rank
        self.num_with_adapter += rank > 0
        if rank > self.max_rank:
            self.max_rank = rank

    def remove(self, rank: int) -> None:
        """A request has ended or left."""
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
        """One of the requests no longer waits."""
        self.num_waiting -= 1
        self.pending_tokens -= tokens
        self.pending_token_ranks -= tokens * rank
        if _discount(self.pending_ranks, rank) and rank == self.pending_max_rank:
            self.pending_max_rank = max(self.pending_ranks, default=0)

    def copy(self) -> ReplicaState:
        """Return a copy of the state; `resident` and `on_host` are shared and stay current."""
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


NUM_HOMES = 2
"""Replicas that an adapter's requests hash to."""

_MAX_HOMES = 1 << 16


class Replicas(list[ReplicaState]):
    """States of replicas in the order of their indices, which of them hold an adapter, and its homes.

    Membership doesn't change; states do. The names are unique.
    """

    def __init__(self, states: Iterable[ReplicaState], holders: Holders | None = None) -> None:
        """holders: an index of the adapters held, possibly by more replicas; without it, all states are searched."""
        super().__init__(states)
        self._holders = holders
        self._places = {state.name: index for index, state in enumerate(self)}
        self._keys = [key_of(name) for name in self._places]
        self._homes: dict[str, tuple[int, ...]] = {}

    def holders(self, adapter: str) -> Sequence[str]:
        """Return the names of the replicas that hold an adapter, possibly including some that are not in this list."""
        if self._holders is not None:
            return self._holders.of(adapter)
        return [state.name for state in self if adapter in state.on_host or adapter in state.resident]

    def find(self, name: str) -> int | None:
        """Return the index of a replica; None if it is not among these."""
        return self._places.get(name)

    def homes(self, adapter: str) -> tuple[int, ...]:
        """Return the `NUM_HOMES` replicas with the highest rendezvous weights for an adapter, the highest first."""
        homes = self._homes.get(adapter)
        if homes is None:
            found = weights(adapter, self._keys)
            homes = tuple(map(found.index, sorted(found)[: -NUM_HOMES - 1 : -1]))
            if len(self._homes) == _MAX_HOMES:
                self._homes.clear()
            self._homes[adapter] = homes
        return homes


class Policy(Protocol):
    """Chooses by its arguments only; it remembers no requests and no replicas."""

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        """Index of the replica; None if the request should wait at the router, first come first served."""
        ...
