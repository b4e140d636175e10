"""Adapter affinity: an adapter's requests go to replicas that hold it, or to its home, while loads stay even."""

from __future__ import annotations

from collections.abc import Sequence

from .replicas import ReplicaState, Routed, key_of, weights

SLACK = 1.25
"""How far a replica may exceed the mean number of requests before its adapters' requests spill over (Mirrokni et al.,
"Consistent Hashing with Bounded Loads", 2016; their factor is 1 + ε).
"""

FREE_REQUESTS = 2
"""Requests that any replica may have, whatever the mean: with little load, affinity costs nothing."""


class Affinity:
    """The least loaded replica that holds the adapter, or the first by rendezvous hash that is not overloaded.

    A replica is overloaded without room, or with more than `SLACK` times the mean of requests. A request for the base
    model, or one for which every replica is overloaded, goes to the replica with the fewest requests.
    """

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        adapter = request.adapter
        everywhere = range(len(replicas))
        if adapter is not None:
            mean = sum(replica.num_requests for replica in replicas) / len(replicas)
            most = max(FREE_REQUESTS, SLACK * mean)
            fit = [i for i in everywhere if replicas[i].num_requests < most and replicas[i].has_room(request)]
            if holders := [i for i in fit if adapter in replicas[i].resident]:
                return min(holders, key=lambda i: replicas[i].num_requests)
            if fit:
                found = weights(adapter, (key_of(replicas[i].name) for i in fit))
                return fit[found.index(max(found))]
        return min(everywhere, key=lambda i: replicas[i].num_requests)
