"""Policies that know nothing of adapters: what the others are measured against."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .replica_state import ReplicaState, Routed


class MostIdle:
    """The replica with the fewest requests, the first among equals."""

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        loads = [replica.num_requests for replica in replicas]
        return loads.index(min(loads))


class Random:
    """Any replica. The same seed gives the same choices."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        return int(self._random.random() * len(replicas))


class FirstFit:
    """The first replica that has room, as bins are packed; where none has, the request waits."""

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        for index, replica in enumerate(replicas):
            if replica.has_room(request):
                return index
        return None
