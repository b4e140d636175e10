"""dLoRA's proactive dispatch (§5.1): the shortest time until the request can begin."""

from __future__ import annotations

from collections.abc import Sequence

from .estimates import Estimates, Load
from .replica_state import ReplicaState, Routed


class PendingTime:
    """The replica with the shortest estimated pending time: loading the adapter, if it is not there, and queueing.

    Queueing is the prefill of the prompts that wait; where seats are short a mean answer's time for each request
    too many, shared among the seats; and where pages are short the time until ended requests have given back as much
    KV. The fewest requests decide among equals.
    """

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        tokens, load = self._estimates.answers.expected(request.adapter), self._estimates.load_of(request.adapter)
        scores = [
            (self.seconds(request, replica, tokens, load), replica.num_requests, index)
            for index, replica in enumerate(replicas)
        ]
        return min(scores)[2]

    def seconds(self, request: Routed, replica: ReplicaState, output_tokens: float, load: Load) -> float:
        """Seconds until the request can begin at a replica. output_tokens: of a mean answer. load: of its adapter."""
        queue = 0.0
        if replica.pending_tokens:
            queue = self._estimates.costs.queue_seconds(
                replica.pending_tokens, replica.num_waiting, replica.pending_token_ranks, replica.pending_max_rank
            )
        queue += self.room_seconds(request, replica, output_tokens)
        return queue + load.seconds(replica)

    def room_seconds(self, request: Routed, replica: ReplicaState, output_tokens: float) -> float:
        """Seconds until ended requests have left a seat and pages."""
        kv_tokens, seats_short = replica.kv_tokens, replica.num_requests + 1 - replica.max_num_seqs
        tokens_short = replica.pending_tokens + request.prompt_tokens - replica.free_tokens
        if seats_short <= 0 and (tokens_short <= 0 or not kv_tokens):
            return 0.0
        step = self._estimates.costs.batch_seconds(
            min(replica.num_requests, replica.max_num_seqs), replica.num_with_adapter, replica.sum_ranks,
            replica.max_rank, kv_tokens, replica.longest_tokens,
        )  # fmt: skip
        # The running requests end one after another, evenly over a mean answer's time.
        seats = max(0, seats_short) / replica.max_num_seqs
        pages = tokens_short / kv_tokens if kv_tokens else 0.0
        return output_tokens * step * max(seats, pages)
