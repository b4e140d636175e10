"""States of replicas that have requests."""

from __future__ import annotations

from collections.abc import Container, Iterable

from chorus.server.cluster.router import ReplicaState


def replica_state(
    max_num_seqs: int,
    running: Iterable[int] = (),
    waiting: Iterable[tuple[int, int]] = (),
    free_tokens: int = 1 << 40,
    resident: Container[str] = frozenset(),
    kv_tokens: int = 0,
    name: str = "",
) -> ReplicaState:
    """running: rank of each request. waiting: prompt tokens and rank of each."""
    state = ReplicaState(max_num_seqs, free_tokens=free_tokens, resident=resident, kv_tokens=kv_tokens, name=name)
    waiting = list(waiting)
    for rank in (*running, *(rank for _, rank in waiting)):
        state.add(rank)
    state.set_waiting(waiting)
    return state
