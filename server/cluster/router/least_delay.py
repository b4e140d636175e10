"""Chorus's own routing policy: the least added delay among a few candidates."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

from .estimates import Estimates
from .pending_time import PendingTime
from .rank_aware import RankAware
from .replicas import NUM_HOMES, Replicas, Routed

NUM_HOLDERS = 2
NUM_RANDOM = 2
"""Candidates in addition to the homes: of the replicas that hold the adapter, and of all; two are enough for the power
of two choices (Mitzenmacher, "How Useful Is Old Information?", 2000).
"""

MAX_CANDIDATES = NUM_HOLDERS + NUM_HOMES + NUM_RANDOM
"""Most replicas that a decision considers; in a cluster of no more, it considers all."""


class LeastDelay:
    """The candidate where a request adds the least delay: its own, and that of the requests there.

    The delay in seconds per token has two parts. The request's own: the time until there is room for it and its adapter
    (dLoRA's pending time), the prefill of the queue with it, because prompts share steps, and a decode step with it.
    And the slowdown of each request there (CaraServe's score, with its penalty beyond the SLO).

    Candidates are two replicas that hold the adapter, its two homes by rendezvous hash, and two of all. All but the
    homes are drawn anew for each request, so requests that arrive between two reports, at this router or at others,
    spread over replicas.
    """

    def __init__(self, estimates: Estimates, seed: int | None = 0) -> None:
        """seed: the same seed gives the same draws; None: routers of one cluster draw differently."""
        self._estimates = estimates
        self._pending = PendingTime(estimates)
        self._slowdown = RankAware(estimates)
        self._random = random.Random(seed)

    def __call__(self, request: Routed, replicas: Replicas) -> int | None:
        tokens = self._estimates.answers.expected(request.adapter)
        slowdown, room_seconds = self._slowdown.slowdown(request, tokens), self._pending.room_seconds
        best, least, fewest = 0, math.inf, 0
        for index in self._candidates(request.adapter, replicas):
            replica = replicas[index]
            slower, queue, step = slowdown(replica)
            if not replica.has_room(request):
                queue += room_seconds(request, replica, tokens)
            requests = replica.num_requests
            delay = queue / tokens + step + slower * requests
            if delay < least or (delay == least and requests < fewest):
                best, least, fewest = index, delay, requests
        return best

    def _candidates(self, adapter: str | None, replicas: Replicas) -> Collection[int]:
        """Candidates' indices; among equal replicas the first is chosen."""
        count, draw = len(replicas), self._random.random
        homes = () if adapter is None else replicas.homes(adapter)
        if count <= MAX_CANDIDATES:
            return dict.fromkeys((*homes, *range(count)))
        if adapter is None:
            return dict.fromkeys([int(draw() * count) for _ in range(MAX_CANDIDATES)])
        holders = replicas.holders(adapter)
        if len(holders) > NUM_HOLDERS:
            first, second = int(draw() * len(holders)), int(draw() * (len(holders) - 1))
            holders = holders[first], holders[second + (second >= first)]
        held = [index for name in holders if (index := replicas.find(name)) is not None]
        return dict.fromkeys((*held, *homes, int(draw() * count), int(draw() * count)))
