"""Punica's consolidation (§5.1): a busy replica stays busy, an idle one stays idle and can be given back."""

from __future__ import annotations

from collections.abc import Sequence

from .replica_state import ReplicaState, Routed


class Consolidate:
    """The replica with the most requests that still has room, the last among equals; where none has, wait.

    A lightly loaded replica, below `light` of its seats, tells whether the cluster is large enough: `wants_more`.
    """

    def __init__(self, light: float = 0.5) -> None:
        """light: share of `max_num_seqs`."""
        self._light = light

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        best, most = None, -1
        for index, replica in enumerate(replicas):
            if replica.num_requests >= most and replica.has_room(request):
                best, most = index, replica.num_requests
        return best

    def wants_more(self, replicas: Sequence[ReplicaState]) -> bool:
        """No replica is lightly loaded: ask for another."""
        return all(replica.num_requests >= self._light * replica.max_num_seqs for replica in replicas)

    def releasable(self, replicas: Sequence[ReplicaState]) -> list[int]:
        """Indices of replicas that can be given back: those without requests, but for one lightly loaded replica.

        Where no other replica is lightly loaded, one of the idle ones stays.
        """
        idle = [index for index, replica in enumerate(replicas) if not replica.num_requests]
        others = [replica for replica in replicas if replica.num_requests]
        return idle[1:] if self.wants_more(others) else idle
