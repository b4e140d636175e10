"""CaraServe's rank-aware scheduling (§5, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from .estimates import Estimates
from .replica_state import ReplicaState, Routed

K = TypeVar("K")
V = TypeVar("V")

_MOST_TERMS = 1 << 18


class RankAware:
    """The replica that becomes slower by the least, summed over its requests, and if possible stays within the SLO.

    A replica's score is `(Δprefill / output_tokens + Δdecode [+ penalty]) · requests`: Δprefill by how much longer
    its queue takes to prefill with the request, Δdecode by how much longer its decode step takes with it, both by the
    cost model; output_tokens a mean answer's; the penalty if that step then takes longer than the SLO. Candidates are
    the replicas with room; where none has any, all are.

    Where a step takes as long for one short prompt as for several, Δprefill is 0 as soon as one waits: the policy then
    gathers prompts, which spares the running requests a step. Where prompts share steps with rows that decode, no
    request is held up by a step of prompts alone, and Δprefill is by how much longer the next step takes with the
    request, the running requests being in it as well.

    The paper's decode step depends on ranks alone, and its servers hide loading. Here the decode step has the cost
    model's KV term, too, which decides for long prompts: that of the running requests, of the prompts that wait, and of
    the request's own; and an adapter that is not in the arena adds its loading to Δprefill.
    """

    def __init__(self, estimates: Estimates, penalty: float = 1.0) -> None:
        """penalty: seconds, far above any step's."""
        self._estimates = estimates
        self._penalty = penalty
        self._costs = estimates.costs  # by which the terms below are known
        self._steps: dict[tuple[int, int, int, int, int], tuple[float, float]] = {}  # see `_decode_steps`
        self._alone: dict[tuple[int, int, int], tuple[float, float]] = {}  # see `_lone_queues`

    def __call__(self, request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
        tokens = self._estimates.answers.expected(request.adapter)
        best, least, fits = 0, math.inf, False
        for index, replica in enumerate(replicas):
            room = replica.has_room(request)
            if fits and not room:
                continue
            total = self.slowdown(request, replica, tokens)[0] * replica.num_requests
            if total < least or (room and not fits):
                best, least, fits = index, total, room
        return best

    def slowdown(self, request: Routed, replica: ReplicaState, output_tokens: float) -> tuple[float, float, float]:
        """Return by how many seconds per token each request there becomes slower, with the penalty; the seconds that
        its queue's prefill takes with the request, loading included; and a decode step's seconds with it.

        output_tokens: of a mean answer.
        """
        costs, rank, tokens = self._estimates.costs, request.rank or 0, request.prompt_tokens
        if costs is not self._costs:
            self._costs = costs
            self._steps.clear()
            self._alone.clear()
        requests = replica.num_requests
        if replica.num_waiting:
            before, queue = self._queues(replica, tokens, rank)
        else:
            alone = requests if self._estimates.mix else 0, tokens, rank
            queues = self._alone.get(alone)
            before, queue = _kept(self._alone, alone, self._lone_queues(*alone)) if queues is None else queues
        load = self._estimates.load_seconds(request.adapter, replica)
        key = requests, replica.num_with_adapter, replica.sum_ranks, replica.max_rank, rank
        step = self._steps.get(key)
        if step is None:
            step = _kept(self._steps, key, self._decode_steps(*key))
        more, after = step
        per_kv_token, per_longest, longest = costs.step.per_kv_token, costs.step.per_longest, replica.longest_tokens
        more += per_kv_token * tokens
        if tokens > longest:
            more += per_longest * (tokens - longest)
            longest = tokens
        kv_tokens = replica.kv_tokens + replica.pending_tokens + tokens
        after = after + per_kv_token * kv_tokens + per_longest * longest
        slower = (queue - before + load) / output_tokens + more
        return slower + self._penalty if after > self._estimates.slo else slower, queue + load, after

    def _decode_steps(self, requests: int, users: int, sum_ranks: int, max_rank: int, rank: int) -> tuple[float, float]:
        """Return by how much a decode step takes longer with a request of `rank`, and its seconds then; both but for
        what is in the KV cache. users: of adapters.
        """
        before = self._decode_seconds(requests, users, sum_ranks, max_rank)
        after = self._decode_seconds(requests + 1, users + (rank > 0), sum_ranks + rank, max(max_rank, rank))
        return after - before, after

    def _decode_seconds(self, requests: int, users: int, sum_ranks: int, max_rank: int) -> float:
        """A decode step of a batch; every request counts as one with an adapter of its own."""
        return self._costs.batch_seconds(requests, users, sum_ranks, max_rank) if requests else 0.0

    def _lone_queues(self, beside: int, tokens: int, rank: int) -> tuple[float, float]:
        """`_queues` where no prompt waits, with `beside` requests that decode in its step."""
        if not self._estimates.mix:
            return 0.0, self._costs.queue_seconds(tokens, 1, tokens * rank, rank)
        return self._decode_seconds(beside, 0, 0, 0), self._mixed_seconds(beside + tokens, beside + 1)

    def _queues(self, replica: ReplicaState, tokens: int, rank: int) -> tuple[float, float]:
        """Return the seconds of the step that prefills the queue without the request, and with it."""
        waiting, pending = replica.num_waiting, replica.pending_tokens
        if self._estimates.mix:
            rows, pending = replica.num_requests, pending + replica.num_requests - waiting
            return self._mixed_seconds(pending, rows), self._mixed_seconds(pending + tokens, rows + 1)
        token_ranks, largest = replica.pending_token_ranks, replica.pending_max_rank
        before = self._costs.queue_seconds(pending, waiting, token_ranks, largest)
        token_ranks += tokens * rank
        return before, self._costs.queue_seconds(pending + tokens, waiting + 1, token_ranks, max(largest, rank))

    def _mixed_seconds(self, tokens: int, rows: int) -> float:
        """A step of prompts and rows that decode, without their adapters: adapters are Δdecode's part."""
        return self._costs.step.seconds(tokens, rows, ragged=True)


def _kept(known: dict[K, V], key: K, value: V) -> V:
    """Keep a value, of the latest `_MOST_TERMS`."""
    if len(known) == _MOST_TERMS:
        known.clear()
    known[key] = value
    return value
