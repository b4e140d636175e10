"""Interface of routing policies."""

from __future__ import annotations

from typing import Protocol

from .replica_state import Routed
from .replicas import Replicas


class Policy(Protocol):
    """Chooses by what it is given; it holds nothing of requests and replicas that it has seen."""

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        """Index of the replica; None when the request had better wait at the router, first come first served."""
        ...
