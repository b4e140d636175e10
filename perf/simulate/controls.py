"""What policies are compared with: rank-aware routing without ranks, and turns."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from ...server.cluster.router import Policy, Replicas, ReplicaState, Routed
from ..workload import WorkloadSpec


class RankBlind:
    """A policy to which every adapter has one rank, so that it can only tell how many requests and tokens there are."""

    def __init__(self, policy: Policy, rank: int) -> None:
        """rank: of every adapter, the mean of what it stands for."""
        self._policy = policy
        self._rank = rank
        self._seen = self._blurred = Replicas([])

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        if replicas is not self._seen:
            self._seen = replicas
            self._blurred = Replicas(cast("ReplicaState", _Blurred(replica, self._rank)) for replica in replicas)
        return self._policy(_Asked(request, self._rank), self._blurred)


class RoundRobin:
    """Requests go in turn to the replicas that hold their adapter, to all where none does (dLoRA's RR, §7.4)."""

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
    ranks = users = 0
    for batch in spec.batches():
        ranks += int(batch.rank.sum())
        users += int((batch.rank > 0).sum())
    return max(1, round(ranks / max(1, users)))


class _Asked:
    """A request; its adapter, if it has one, has the one rank."""

    def __init__(self, request: Routed, rank: int) -> None:
        self.adapter = request.adapter
        self.prompt_tokens = request.prompt_tokens
        self.rank = rank if request.adapter is not None else 0


class _Blurred:
    """A replica's state, in which every adapter has the one rank; prompts that wait all count as an adapter's."""

    def __init__(self, state: ReplicaState, rank: int) -> None:
        self._state = state
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    @property
    def sum_ranks(self) -> int:
        return self._state.num_with_adapter * self._rank

    @property
    def max_rank(self) -> int:
        return self._rank if self._state.num_with_adapter else 0

    @property
    def pending_token_ranks(self) -> int:
        return self._state.pending_tokens * self._rank

    @property
    def pending_max_rank(self) -> int:
        return self._rank if self._state.pending_max_rank else 0
