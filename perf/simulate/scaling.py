"""Replicas that follow the load, as in `chorus cluster up --max-replicas`: the same hints, one replica at a time."""

from __future__ import annotations

from ...server.cluster.router.scale import STEADY_SECONDS, SteadyHint, scale_hint
from .cluster import Cluster, Event, Happened
from .replica import Phase

LOOK_SECONDS = 1.0


class Scaling:
    """A controller that obeys scale hints. One that is given back ends the requests that it has, which fronts would
    have moved.

    replica_seconds: that replicas have been there, booting ones included, up to the last look.
    """

    def __init__(self, least: int, most: int, boot_seconds: float, steady_seconds: float = STEADY_SECONDS) -> None:
        """least, most: replicas. boot_seconds: until one that is started serves."""
        self.replica_seconds = 0.0
        self._least, self._most = least, most
        self._boot_seconds = boot_seconds
        self._hint = SteadyHint(steady_seconds)
        self._looked: float | None = None

    def __call__(self, event: Event, cluster: Cluster) -> None:
        now = event.time
        if self._looked is None:
            self._looked = now
            cluster.tick(LOOK_SECONDS)
        if event.kind is not Happened.TICK or now < self._looked + LOOK_SECONDS:  # ticks may be another's
            return
        there = [replica for replica in cluster.replicas if replica.phase is not Phase.GONE]
        self.replica_seconds += len(there) * (now - self._looked)
        self._looked = now
        self._follow(now, cluster, is_whole=len(there) == len(cluster.serving))
        cluster.tick(LOOK_SECONDS)

    def _follow(self, now: float, cluster: Cluster, *, is_whole: bool) -> None:
        """is_whole: no replica is coming or going."""
        serving = cluster.serving
        states = [replica.look(now) for replica in serving]
        self._hint.update(scale_hint(states, cluster.num_held) if is_whole else None, now)
        wanted = min(max(len(serving) + self._hint.value, self._least), self._most)
        if wanted == len(serving) or not is_whole:
            return
        if wanted > len(serving):
            cluster.boot(self._boot_seconds)
        else:
            cluster.drain(serving[-1].index)
        self._hint.update(None, now)
