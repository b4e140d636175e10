"""Scale hints: a cluster needs one more replica, or one fewer (Punica, §5.1)."""

from __future__ import annotations

from collections.abc import Sequence

from .replicas import ReplicaState

STEADY_SECONDS = 30.0
"""Seconds for which a hint must hold before it is reported; about the start time of a replica."""


def scale_hint(replicas: Sequence[ReplicaState], num_waiting: int) -> int:
    """1: no replica is lightly loaded, or requests wait for one. -1: two are, and one could take the other's requests.

    A replica is lightly loaded if at most half of its slots and at most half of its pages are in use.
    """
    light = sum(
        2 * one.num_requests <= one.max_num_seqs and one.kv_tokens + one.pending_tokens <= one.free_tokens
        for one in replicas
    )
    if num_waiting or not light:
        return 1
    return -1 if light > 1 else 0


class SteadyHint:
    """The latest hint that has held for `seconds`."""

    def __init__(self, seconds: float = STEADY_SECONDS) -> None:
        self.value = 0
        self._seconds = seconds
        self._next, self._since = 0, 0.0

    def update(self, hint: int | None, now: float) -> bool:
        """Take the current hint; True when `value` has changed.

        None while replicas come or go: the hint is reset, and the next one must hold again, so two changes are at least
        `seconds` apart.
        """
        if hint is None:
            self._next, self._since, changed = 0, now, self.value != 0
            self.value = 0
            return changed
        if hint != self._next:
            self._next, self._since = hint, now
        if hint == self.value or now - self._since < self._seconds:
            return False
        self.value = hint
        return True
