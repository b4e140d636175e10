"""Interface of routing policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .replica_state import ReplicaState, Routed


class Policy(Protocol):
    """Chooses by what it is given; it holds nothing of requests and replicas that it has seen."""

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        """Index of the replica; None when the request had better wait at the router, first come first served."""
        ...
