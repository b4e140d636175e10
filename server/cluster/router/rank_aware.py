"""CaraServe's rank-aware scheduling (§5, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....core.costs.models import CostModel
from .replica_state import ReplicaState, Routed

_MOST_SCORES = 1 << 18


class RankAware:
    """The replica that becomes slower by the least, summed over its requests, and if possible stays within the SLO.

    A replica's score is `(Δprefill / mean_output_tokens + Δdecode [+ penalty]) · requests`: Δprefill by how much longer
    its queue takes to prefill with the request, Δdecode by how much longer its decode step takes with it, both by the
    cost model; the penalty if that step then takes longer than `slo`. Candidates are the replicas with room; where none
    has any, all are.

    Where a step takes as long for one short prompt as for several, Δprefill is 0 as soon as one waits: the policy then
    gathers prompts, which spares those that run a step. With `mix` nobody is held up by a step of prompts alone, and
    Δprefill is by how much longer the next step takes with the request, those that run being in it as well.
    """

    def __init__(
        self, costs: CostModel, slo: float, mean_output_tokens: float, penalty: float = 1.0, *, mix: bool = False
    ) -> None:
        """slo: seconds per token. mean_output_tokens: infinite where prompts count for nothing. penalty: seconds, far
        above any step's. mix: prompts share steps with those that decode, as in Chorus; otherwise they interrupt
        them, as in the paper (§2.2).
        """
        self._costs = costs
        self._slo = slo
        self._mean_output_tokens = mean_output_tokens
        self._penalty = penalty
        self._mix = mix
        self._scores: dict[tuple[int, int, int, int, int], float] = {}  # of decoding, see `_score`

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        rank, tokens = request.rank or 0, request.prompt_tokens
        alone: dict[int, float] = {}  # Δprefill of an empty queue, by how many run beside it
        best, least, fits, scores = 0, math.inf, False, self._scores
        for index, replica in enumerate(replicas):
            room = replica.has_room(request)
            if fits and not room:
                continue
            requests = replica.num_requests
            if replica.num_waiting:
                prefill = self._more_prefill(replica, tokens, rank)
            else:
                beside = requests if self._mix else 0
                prefill = alone.get(beside)
                if prefill is None:
                    prefill = alone[beside] = self._lone_prefill(beside, tokens, rank)
            key = requests, replica.num_with_adapter, replica.sum_ranks, replica.max_rank, rank
            score = scores.get(key)
            if score is None:
                score = self._score(*key)
                if len(scores) < _MOST_SCORES:
                    scores[key] = score
            total = (prefill / self._mean_output_tokens + score) * requests
            if total < least or (room and not fits):
                best, least, fits = index, total, room
        return best

    def _score(self, requests: int, users: int, sum_ranks: int, max_rank: int, rank: int) -> float:
        """Seconds that a decode step takes longer with a request of `rank`, and the penalty. users: of adapters."""
        before = self._decode_seconds(requests, users, sum_ranks, max_rank)
        after = self._decode_seconds(requests + 1, users + (rank > 0), sum_ranks + rank, max(max_rank, rank))
        return after - before + (self._penalty if after > self._slo else 0.0)

    def _decode_seconds(self, requests: int, users: int, sum_ranks: int, max_rank: int) -> float:
        """A decode step of a batch; every request counts as one with an adapter of its own."""
        return self._costs.batch_seconds(requests, users, sum_ranks, max_rank) if requests else 0.0

    def _lone_prefill(self, beside: int, tokens: int, rank: int) -> float:
        """Seconds that the only prompt takes, in a step with `beside` requests that decode."""
        if not self._mix:
            return self._costs.queue_seconds(tokens, 1, tokens * rank, rank)
        return self._mixed_seconds(beside + tokens, beside + 1) - self._decode_seconds(beside, 0, 0, 0)

    def _more_prefill(self, replica: ReplicaState, tokens: int, rank: int) -> float:
        waiting, pending = replica.num_waiting, replica.pending_tokens
        if self._mix:
            rows, pending = replica.num_requests, pending + replica.num_requests - waiting
            return self._mixed_seconds(pending + tokens, rows + 1) - self._mixed_seconds(pending, rows)
        token_ranks, largest = replica.pending_token_ranks, replica.pending_max_rank
        after = self._costs.queue_seconds(
            pending + tokens, waiting + 1, token_ranks + tokens * rank, max(largest, rank)
        )  # fmt: skip
        return after - self._costs.queue_seconds(pending, waiting, token_ranks, largest)

    def _mixed_seconds(self, tokens: int, rows: int) -> float:
        """A step of prompts and rows that decode, without their adapters: those are Δdecode's part."""
        return self._costs.queue_seconds(tokens, rows, 0, 0)
