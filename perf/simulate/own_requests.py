"""A router that counts what it has sent since replicas reported, as a cluster's front does."""

from __future__ import annotations

from ...server.cluster.router import Policy, Replicas, Routed


class CountsOwn:
    """A policy's choice, noted in what the router knows of the replica until that reports again."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        index = self._policy(request, replicas)
        if index is not None:
            replicas[index].add(request.rank or 0)
            replicas[index].add_waiting(request.prompt_tokens, request.rank or 0)
        return index
