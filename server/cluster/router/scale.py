"""Scale hints: whether a cluster needs one more replica, or could give one back (Punica, §5.1)."""

from __future__ import annotations

from collections.abc import Sequence

from .replica_state import ReplicaState

STEADY_SECONDS = 30.0
"""Seconds for which a hint must hold before it is given; about what a replica takes to start."""


def scale_hint(replicas: Sequence[ReplicaState], num_waiting: int) -> int:
    """1: no replica is lightly loaded, or requests wait for one. -1: two are, and one could take the other's requests.

    Lightly loaded is a replica with requests in at most half of its slots and KV in at most half of its pages.
    """
    light = sum(
        2 * one.num_requests <= one.max_num_seqs and one.kv_tokens + one.pending_tokens <= one.free_tokens
        for one in replicas
    )
    if num_waiting or not light:
        return 1
    return -1 if light > 1 else 0


class SteadyHint:
    """The hint that has held for `STEADY_SECONDS`; until another one has, the last one that did."""

    def __init__(self) -> None:
        self.value = 0
        self._next, self._since = 0, 0.0

    def update(self, hint: int, now: float) -> bool:
        """Take the hint of this moment; True when `value` has changed."""
        if hint != self._next:
            self._next, self._since = hint, now
        if hint == self.value or now - self._since < STEADY_SECONDS:
            return False
        self.value = hint
        return True
