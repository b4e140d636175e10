"""Policies that ignore adapters: baselines, and building blocks of others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .replicas import Policy, Replicas, ReplicaState, Routed


class MostIdle:
    """The replica with the fewest requests, the first among equals."""

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        loads = [replica.num_requests for replica in replicas]
        return loads.index(min(loads))


class Random:
    """A random replica. The same seed gives the same choices."""

    def __init__(self, seed: int | None = 0) -> None:
        self._random = random.Random(seed)

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        return int(self._random.random() * len(replicas))


class Sampled:
    """Another policy's choice among a few replicas drawn at random for each request: the power of two choices.

    Policies that always take the best replica send everything that arrives between two reports to the same one. With
    more replicas it gets a larger multiple of its share. Among a few random candidates, requests spread (Mitzenmacher,
    "How Useful Is Old Information?", 2000). The same seed gives the same draws.
    """

    def __init__(self, policy: Policy, choices: int = 2, seed: int = 0) -> None:
        """choices: how many are drawn. Raises ValueError below 1."""
        if choices < 1:
            raise ValueError(f"choices is {choices}; draw at least 1")
        self._policy = policy
        self._choices = choices
        self._random = random.Random(seed)

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        if self._choices >= len(replicas):
            return self._policy(request, replicas)
        drawn = self._random.sample(range(len(replicas)), self._choices)
        chosen = self._policy(request, Replicas(replicas[index] for index in drawn))
        return None if chosen is None else drawn[chosen]


class FirstFit:
    """The first replica that has room, as in bin packing; if none has room, the request waits."""

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        for index, replica in enumerate(replicas):
            if replica.has_room(request):
                return index
        return None


class Consolidate:
    """Punica's consolidation (§5.1): a busy replica stays busy, an idle one stays idle and can be removed.

    The replica with the most requests that still has room, the last among equals; if none has room, the request waits.
    """

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        best, most = None, -1
        for index, replica in enumerate(replicas):
            if replica.num_requests >= most and replica.has_room(request):
                best, most = index, replica.num_requests
        return best
