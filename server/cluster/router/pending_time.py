"""dLoRA's proactive dispatch (§5.1): the shortest time until the request can begin."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .estimates import Estimates
from .replicas import ReplicaState, Routed


class PendingTime:
    """The replica with the shortest estimated pending time: loading the adapter, if it is not there, and queueing.

    Queueing is the sum of three parts: the prefill of the waiting prompts; if slots are short, a mean completion's time
    for each request too many, divided by the slots; and if pages are short, the time until ended requests have freed as
    much KV. Among equal replicas the fewest requests decide.
    """

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        estimates, adapter = self._estimates, request.adapter
        tokens, load = estimates.answers.expected(adapter), estimates.load_of(adapter)
        queue_seconds, room_seconds = estimates.queue_seconds, self.room_seconds
        best, least, fewest = 0, math.inf, 0
        for index, replica in enumerate(replicas):
            seconds, requests = queue_seconds(replica) if replica.pending_tokens else 0.0, replica.num_requests
            if not replica.has_room(request):
                seconds += room_seconds(request, replica, tokens)
            if adapter is not None and adapter not in replica.resident:
                seconds += load.seconds(replica)
            if seconds < least or (seconds == least and requests < fewest):
                best, least, fewest = index, seconds, requests
        return best

    def room_seconds(self, request: Routed, replica: ReplicaState, output_tokens: float) -> float:
        """Seconds until ended requests have freed a slot and pages."""
        kv_tokens, seats_short = replica.kv_tokens, replica.num_requests + 1 - replica.max_num_seqs
        tokens_short = replica.pending_tokens + request.prompt_tokens - replica.free_tokens
        if seats_short <= 0 and (tokens_short <= 0 or not kv_tokens):
            return 0.0
        step = self._estimates.costs.batch_seconds(
            rows=min(replica.num_requests, replica.max_num_seqs),
            users=replica.num_with_adapter,
            ranks=replica.sum_ranks,
            max_rank=replica.max_rank,
            kv_tokens=kv_tokens,
            longest=replica.longest_tokens,
        )
        # The running requests end one after another, evenly over a mean completion's time.
        seats = max(0, seats_short) / replica.max_num_seqs
        pages = tokens_short / kv_tokens if kv_tokens else 0.0
        return output_tokens * step * max(seats, pages)
