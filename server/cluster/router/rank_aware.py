"""CaraServe's rank-aware scheduling (§5, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .estimates import Estimates
from .replicas import ReplicaState, Routed

_MOST_TERMS = 1 << 18


class RankAware:
    """The replica that slows down least, summed over its requests, and if possible stays within the SLO.

    A replica's score is `(Δprefill / output_tokens + Δdecode [+ penalty]) · requests`. Δprefill is the increase of its
    queue's prefill time, Δdecode the increase of its decode step time, both by the cost model. output_tokens is a mean
    completion's. The penalty applies if that step then takes longer than the SLO. Candidates are the replicas with
    room; if none has any, all are.

    If a step takes as long for one short prompt as for several, Δprefill is 0 as soon as one waits: the policy then
    gathers prompts, which saves the running requests a step. If prompts share steps with decoding sequences, no
    prefill-only step delays a request, and Δprefill is the increase of the next step, which includes the running
    requests.

    The paper's decode step depends on ranks only, and its servers hide loading. Here the decode step also has the cost
    model's KV term, which decides for long prompts: for the running requests, the waiting prompts, and the request's
    own. An adapter that is not resident adds its loading to Δprefill.
    """

    def __init__(self, estimates: Estimates, penalty: float = 1.0) -> None:
        """penalty: seconds, far above any step's."""
        self._estimates = estimates
        self._penalty = penalty
        self._costs = estimates.costs  # the costs that the cached terms below were computed with
        self._steps: dict[tuple[int, int, int, int, int], tuple[float, float]] = {}  # see `_decode_steps`

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        slowdown = self.slowdown(request, self._estimates.answers.expected(request.adapter))
        best, least, fits = 0, math.inf, False
        for index, replica in enumerate(replicas):
            room = replica.has_room(request)
            if fits and not room:
                continue
            total = slowdown(replica)[0] * replica.num_requests
            if total < least or (room and not fits):
                best, least, fits = index, total, room
        return best

    def slowdown(self, request: Routed, output_tokens: float) -> Callable[[ReplicaState], tuple[float, float, float]]:
        """Return the prices of a request on a replica: seconds per token by which each request there becomes slower,
        with the penalty; the seconds of the queue's prefill with the request, including loading; and a decode step's
        seconds with it.

        output_tokens: of a mean completion.
        """
        estimates, rank, tokens = self._estimates, request.rank or 0, request.prompt_tokens
        costs, slo, penalty = estimates.costs, estimates.slo, self._penalty
        if costs is not self._costs:
            self._costs = costs
            self._steps.clear()
        adapter, load, steps = request.adapter, estimates.load_of(request.adapter), self._steps
        queues = self._mixed_queues if estimates.mix else self._queues
        per_kv_token, per_longest = costs.step.per_kv_token, costs.step.per_longest

        def price(replica: ReplicaState) -> tuple[float, float, float]:
            requests, pending, longest = replica.num_requests, replica.pending_tokens, replica.longest_tokens
            before, queue = queues(replica, tokens, rank)
            key = requests, replica.num_with_adapter, replica.sum_ranks, replica.max_rank, rank
            more, after = steps.get(key) or self._decode_steps(key)
            more += per_kv_token * tokens
            if tokens > longest:
                more += per_longest * (tokens - longest)
                longest = tokens
            after = after + per_kv_token * (replica.kv_tokens + pending + tokens) + per_longest * longest
            loading = 0.0 if adapter is None or adapter in replica.resident else load.seconds(replica)
            slower = (queue - before + loading) / output_tokens + more
            return slower + penalty if after > slo else slower, queue + loading, after

        return price

    def _decode_steps(self, key: tuple[int, int, int, int, int]) -> tuple[float, float]:
        """Return the increase of a decode step's time with one more request, and its seconds then, both without the KV
        term. Every request counts as one with its own adapter; results are cached.

        key: number of requests, of users of adapters, sum of ranks, largest rank, and the request's.
        """
        requests, users, sum_ranks, max_rank, rank = key
        seconds = self._costs.batch_seconds
        before = seconds(requests, users, sum_ranks, max_rank) if requests else 0.0
        after = seconds(requests + 1, users + (rank > 0), sum_ranks + rank, max(max_rank, rank))
        if len(self._steps) == _MOST_TERMS:
            self._steps.clear()
        self._steps[key] = found = after - before, after
        return found

    def _mixed_queues(self, replica: ReplicaState, tokens: int, rank: int) -> tuple[float, float]:
        """Like `_queues`, for a step with decoding sequences. Adapters are left out: they belong to Δdecode."""
        model, requests, waiting = self._costs.step, replica.num_requests, replica.num_waiting
        before, queue = model.with_prompt(replica.pending_tokens + requests - waiting, requests, tokens)
        if waiting:
            return before + model.ragged, queue + model.ragged
        return before if requests else 0.0, queue + model.ragged

    def _queues(self, replica: ReplicaState, tokens: int, rank: int) -> tuple[float, float]:
        """Return the seconds of the prefill-only step for the queue without the request, and with it."""
        waiting = replica.num_waiting
        before = self._estimates.queue_seconds(replica) if waiting else 0.0
        return before, self._costs.queue_seconds(
            replica.pending_tokens + tokens,
            waiting + 1,
            replica.pending_token_ranks + tokens * rank,
            max(replica.pending_max_rank, rank),
        )
