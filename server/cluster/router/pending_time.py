"""dLoRA's proactive dispatch (§5.1): the shortest time until the request can begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.costs.models import CostModel
from .replica_state import ReplicaState, Routed


class PendingTime:
    """The replica with the shortest estimated pending time: loading the adapter, if it is not there, and queueing.

    Loading is the read, unless the adapter is in host memory, and the copy over the link, each behind what is under way
    there. Queueing is the prefill of the prompts that wait; where seats are short a mean answer's time for each request
    too many, shared among the seats; and where pages are short the time until ended requests have given back as much
    KV. The fewest requests decide among equals.
    """

    def __init__(
        self, costs: CostModel, mean_output_tokens: float, adapter_bytes: Callable[[str], int] = lambda name: 0
    ) -> None:
        """adapter_bytes: size of an adapter by its name."""
        self._costs = costs
        self._mean_output_tokens = mean_output_tokens
        self._adapter_bytes = adapter_bytes

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        adapter = request.adapter
        read = copy = 0.0
        if adapter is not None:
            num_bytes = self._adapter_bytes(adapter)
            read, copy = self._costs.disk.seconds(num_bytes), self._costs.link.seconds(num_bytes)
        scores = []
        for index, replica in enumerate(replicas):
            seconds = self._queue_seconds(replica, request.prompt_tokens)
            if adapter is not None and adapter not in replica.resident:
                there = 0.0 if adapter in replica.on_host else replica.disk_seconds + read
                seconds += max(there, replica.link_seconds) + copy
            scores.append((seconds, replica.num_requests, index))
        return min(scores)[2]

    def _queue_seconds(self, replica: ReplicaState, prompt_tokens: int) -> float:
        """Seconds until the replica has room for the request and has begun all that came before it."""
        costs, tokens, kv_tokens = self._costs, replica.pending_tokens, replica.kv_tokens
        seconds = 0.0
        if tokens:
            seconds = costs.queue_seconds(
                tokens, replica.num_waiting, replica.pending_token_ranks, replica.pending_max_rank
            )  # fmt: skip
        seats_short = replica.num_requests + 1 - replica.max_num_seqs
        tokens_short = tokens + prompt_tokens - replica.free_tokens
        if seats_short > 0 or (tokens_short > 0 and kv_tokens):
            step = costs.batch_seconds(
                min(replica.num_requests, replica.max_num_seqs), replica.num_with_adapter, replica.sum_ranks,
                replica.max_rank, kv_tokens, replica.longest_tokens,
            )  # fmt: skip
            # The running requests end one after another, evenly over a mean answer's time.
            seats = max(0, seats_short) / replica.max_num_seqs
            pages = tokens_short / kv_tokens if kv_tokens else 0.0
            seconds += self._mean_output_tokens * step * max(seats, pages)
        return seconds
