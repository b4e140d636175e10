"""dLoRA's proactive dispatch (§5.1): the shortest time until the request can begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.costs.models import CostModel
from .replica_state import ReplicaState, Routed


class PendingTime:
    """The replica with the shortest estimated pending time: loading the adapter, if it is not there, and queueing.

    Queueing is the prefill of the prompts that wait, and where seats are short a mean answer's time for each request
    too many, shared among the seats. The fewest requests decide among equals.
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
        load = 0.0 if adapter is None else self._costs.link.seconds(self._adapter_bytes(adapter))
        scores = [
            (
                self._queue_seconds(replica) + (load if adapter is not None and adapter not in replica.resident else 0),
                replica.num_requests,
                index,
            )
            for index, replica in enumerate(replicas)
        ]
        return min(scores)[2]

    def _queue_seconds(self, replica: ReplicaState) -> float:
        costs, tokens = self._costs, replica.pending_tokens
        seconds = 0.0
        if tokens:
            seconds = costs.queue_seconds(
                tokens, replica.num_waiting, replica.pending_token_ranks, replica.pending_max_rank
            )  # fmt: skip
        too_many = replica.num_requests + 1 - replica.max_num_seqs
        if too_many > 0:
            step = costs.batch_seconds(
                replica.max_num_seqs, replica.num_with_adapter, replica.sum_ranks, replica.max_rank
            )  # fmt: skip
            seconds += too_many * self._mean_output_tokens * step / replica.max_num_seqs
        return seconds
