"""Baseline routing policies for studies: controls of rank-aware routing, round robin, and newer routers that place
adapters on replicas by demand.

Tests: tests/perf/simulate/test_controls.py, tests/perf/simulate/test_placed.py
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import Counter, defaultdict
from math import ceil

from ...server.cluster.router import Estimates, Policy, Replicas, Routed
from ...server.cluster.router.replicas import key_of, weights
from ..workload import WorkloadSpec


def rank_blind(policy: Policy, rank: int) -> Policy:
    """A policy for which every adapter has one rank, so it sees only the numbers of requests and tokens.

    rank: the mean of the ranks that it replaces; replicas must report it, too (`Replica`).
    """
    return lambda request, replicas: policy(_Blind(request, rank if request.adapter else 0), replicas)


class _Blind:
    """A request with another rank."""

    def __init__(self, request: Routed, rank: int) -> None:
        self.adapter, self.prompt_tokens, self.rank = request.adapter, request.prompt_tokens, rank


class RoundRobin:
    """Requests go in rotation to the replicas that hold their adapter, or to all if none does (dLoRA's RR, §7.4)."""

    def __init__(self) -> None:
        self._turns: Counter[str | None] = Counter()

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        adapter = request.adapter
        turn = self._turns[adapter]
        self._turns[adapter] += 1
        found = () if adapter is None else list(map(replicas.find, sorted(replicas.holders(adapter))))
        return found[turn % len(found)] if found else turn % len(replicas)


def mean_rank(spec: WorkloadSpec) -> int:
    """Return the mean rank, rounded, of a workload's requests that use adapters; at least 1."""
    found = Counter(request.rank for request in spec if request.rank)
    return max(1, round(sum(rank * count for rank, count in found.items()) / max(1, found.total())))


class CountsOwn:
    """A policy's choice, recorded in the router's view of the replica until that reports again."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        index = self._policy(request, replicas)
        if index is not None:
            replicas[index].add(request.rank or 0)
            replicas[index].add_waiting(request.prompt_tokens, request.rank or 0)
        return index


EVERY = 500
"""Number of requests after which adapters are reassigned to replicas, by these requests' demand."""


class Placed:
    """A request goes to one of its adapter's replicas, which are reassigned after `EVERY` requests.

    A request for the base model, or for an adapter without requests before the last assignment, goes to the replica
    with the fewest requests.
    """

    def __init__(self) -> None:
        self._demand: defaultdict[tuple[str, int], float] = defaultdict(float)  # by adapter and its rank
        self._num_seen = 0

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        adapter = request.adapter
        if adapter is not None:
            self._demand[adapter, request.rank or 0] += self._demand_of(request)
        self._num_seen += 1
        if self._num_seen % EVERY == 0:
            self._place(dict(self._demand), replicas)
            self._demand.clear()
        found = None if adapter is None else self._choose(adapter, replicas)
        return min(range(len(replicas)), key=lambda index: replicas[index].num_requests) if found is None else found

    @abstractmethod
    def _demand_of(self, request: Routed) -> float: ...

    @abstractmethod
    def _place(self, demand: dict[tuple[str, int], float], replicas: Replicas) -> None: ...

    @abstractmethod
    def _choose(self, adapter: str, replicas: Replicas) -> int | None: ...


class HashedSlots(Placed):
    """Rendezvous hashing with slots (NVIDIA Dynamo, lib/llm/src/lora/controller.rs).

    An adapter's number of replicas is its share of the requests times all slots, rounded up, at least one and at most
    all; if there are not enough slots, proportionally fewer. Adapters with the most requests come first, and each takes
    the replicas of its highest weights that have a slot left. Of these, the one with the fewest requests serves a
    request.
    """

    def __init__(self, slots: int) -> None:
        """slots: most adapters that a replica is given."""
        super().__init__()
        self._slots = slots
        self._sets: dict[str, list[int]] = {}

    def _demand_of(self, request: Routed) -> float:
        return 1.0

    def _place(self, demand: dict[tuple[str, int], float], replicas: Replicas) -> None:
        room, keys = [self._slots] * len(replicas), [key_of(replica.name) for replica in replicas]
        slots, total = sum(room), sum(demand.values())
        ranked = sorted(((count, name) for (name, _), count in demand.items()), key=lambda one: (-one[0], one[1]))[
            :slots
        ]
        counts = [min(len(replicas), max(1, ceil(slots * count / total))) for count, _ in ranked]
        scale = min(1.0, slots / sum(counts))
        self._sets = {}
        for count, (_, name) in zip(counts, ranked, strict=True):
            found = weights(name, keys)
            order = sorted((index for index, left in enumerate(room) if left), key=found.__getitem__, reverse=True)
            self._sets[name] = order[: max(1, int(count * scale))]
            for index in self._sets[name]:
                room[index] -= 1

    def _choose(self, adapter: str, replicas: Replicas) -> int | None:
        return min(self._sets.get(adapter, ()), key=lambda index: replicas[index].num_requests, default=None)


class RankShares(Placed):
    """Placement by rank and demand, our reading of LoRAServe (arXiv 2511.22880), whose code is not published.

    An adapter's demand is its tokens, divided by the tokens per second of a full replica with only its rank (the rank's
    operating point). In order of rank, and of demand within a rank, adapters are laid end to end, and each replica gets
    an equal share of the whole: it serves neighbouring ranks only. An adapter at a border belongs to both sides, and a
    request goes to each with the probability of its part.
    """

    def __init__(self, estimates: Estimates, seed: int) -> None:
        super().__init__()
        self._estimates = estimates
        self._random = random.Random(seed)
        self._shares: dict[str, dict[int, float]] = {}

    def _demand_of(self, request: Routed) -> float:
        return request.prompt_tokens + self._estimates.answers.expected(request.adapter)

    def _place(self, demand: dict[tuple[str, int], float], replicas: Replicas) -> None:
        rows = min(replica.max_num_seqs for replica in replicas)
        seconds = {rank: self._estimates.costs.batch_seconds(rows, rows, rows * rank, rank) for _, rank in demand}
        used = sorted(((rank, tokens * seconds[rank], name) for (name, rank), tokens in demand.items()), reverse=True)
        share = sum(size for _, size, _ in used) / len(replicas)
        self._shares, begin = {}, 0.0
        for _, size, name in used:
            end = begin + size
            touched = range(int(begin / share), min(len(replicas) - 1, int(end / share)) + 1)
            self._shares[name] = {at: min(end, (at + 1) * share) - max(begin, at * share) for at in touched}
            begin = end

    def _choose(self, adapter: str, replicas: Replicas) -> int | None:
        shares = self._shares.get(adapter)
        if not shares:
            return None
        return self._random.choices(list(shares), [max(0.0, part) for part in shares.values()])[0]
