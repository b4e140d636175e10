"""Tokens of a step: how many each scheduled request computes.

Tests: tests/core/scheduling/test_scheduling.py, tests/core/scheduling/test_service.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from ...memory.adapters.adapter import Adapter
from ..config import EngineConfig
from ..requests.request import Request
from .lifecycle import Lifecycle
from .queues import Running, num_missing, split_prompts
from .service import max_min_level
from .step_target import PromptWork


class TokenBudget:
    """Deals out `max_num_batched_tokens` among requests."""

    __slots__ = (
        "_is_async",
        "_lifecycle",
        "_limits",
        "_running",
        "_truncated",
        "borrowed",
        "counts",
        "left",
        "was_short",
        "work",
    )

    def __init__(
        self,
        limits: EngineConfig,
        running: Running,
        lifecycle: Lifecycle,
        work: PromptWork | None = None,
        *,
        is_async: bool,
    ) -> None:
        """work: what prompts may take of the step's time; None: anything. is_async: the step before this one still
        runs: nothing is preempted for this one.
        """
        self._limits = limits
        self.work = work
        self._running = running
        self._lifecycle = lifecycle
        self._is_async = is_async
        self._truncated: list[Request] = []  # prompts that got less than their rest
        self.counts: dict[Request, int] = {}
        """Tokens of each scheduled request."""
        self.left = 0
        """Tokens that are not dealt out yet."""
        self.borrowed = 0
        """Tokens of `left` beyond the budget, which a descheduled sequence will give back."""
        self.was_short = False
        """True if a request lacked pages that may be free in a later step."""

    def schedule_running(self, requests: Sequence[Request], waiting: Collection[str]) -> None:
        """Deal tokens to running requests until they are used up. waiting: tenants with waiting requests.

        Decoding requests come first, hence long prompts never delay them; then prompts in order of admission.
        """
        prompts, decoding = split_prompts(requests)
        self.left = self._limits.max_num_batched_tokens
        if len(decoding) <= self.left and self._lifecycle.memory.grow_by_one(decoding):
            self.counts, decoding = dict.fromkeys(decoding, 1), []
            self.left -= len(self.counts)
        shares = self._prompt_shares(prompts, len(requests) - len(prompts), waiting)
        behind = self._only_prompts(prompts)
        for request in (*decoding, *prompts):
            if self.left <= 0:
                break
            if not request.is_running:  # preempted for an earlier request
                continue
            least = int(request.adapter in behind)
            behind.discard(request.adapter)
            wanted = min(self.left, self._next_chunk(request))
            count = self._count(request, min(wanted, max(least, self.left - len(behind))), shares)
            if count < wanted:
                self._truncated.append(request)
            if count:
                self._schedule(request, count)

    def _only_prompts(self, prompts: Sequence[Request]) -> set[Adapter | None]:
        """Where a step's adapters are limited, those of which it has prompts alone: each gets at least one token. Else
        one would have a turn, for which others are left out, and no sequence.
        """
        if self._limits.max_adapters_per_step is None or len(prompts) < 2:
            return set()
        decoding = {request.adapter for request in self.counts}
        return {request.adapter for request in prompts} - decoding - {None}

    def _count(self, request: Request, wanted: int, shares: dict[str, int] | None) -> int:
        """How many of `wanted` tokens a running request gets. shares: of tenants with prompts, which are charged."""
        count, start, tenant = self.most(request, wanted), request.num_computed_tokens, request.fairness_key
        if shares is None or num_missing(request) <= 1:
            return self.whole(request, start, count)
        count = self.whole(request, start, min(count, max(0, shares[tenant])))
        shares[tenant] -= count
        return count

    def most(self, request: Request, count: int) -> int:
        """Return how many of `count` tokens of a request fit in what is left of the step."""
        count = min(count, self.left)
        decodes = request.is_running and count < 2
        return count if self.work is None or decodes else self.work.most(request, count)

    def whole(self, request: Request, start: int, count: int) -> int:
        """Return `count` tokens of a request from `start` on, fewer or more where a block of its prompt would be cut; 0
        if the block does not fit in what is left of the step. What prompts may take of its time does not cut a block.
        """
        if not count or not request.blocks.spans:
            return count
        count = request.blocks.chunk(start, count)
        return count if count <= self.left else 0

    def take(self, request: Request, count: int) -> None:
        """Record that the step computes `count` tokens of a request, which are not of `counts` yet."""
        self.counts[request] = self.counts.get(request, 0) + count
        self.left -= count
        has_prompt = num_missing(request) > 1 or request.num_computed_tokens < request.num_prompt_tokens
        if self.work is not None and has_prompt:
            self.work.take(request, count)

    def drop_held(self) -> int:
        """Take back the tokens of prompts that are no longer to be in the step; return of how many."""
        assert self.work is not None
        held = self.work.held
        dropped = [each for each in self.counts if num_missing(each) > 1 and each.fairness_key in held]
        for request in dropped:
            self.left += self.counts.pop(request)
        self._truncated = [each for each in self._truncated if each.fairness_key not in held]
        return len(dropped)

    def begin_admission(self, num_used: int, *, may_borrow: bool) -> None:
        """Leave to waiting requests the tokens that running ones don't use, at least one with `may_borrow`."""
        left = self._limits.max_num_batched_tokens - num_used
        self.borrowed = int(left <= 0 and may_borrow)
        self.left = left + self.borrowed

    def return_borrowed(self) -> None:
        self.left -= self.borrowed
        self.borrowed = 0

    def extend_truncated(self, descheduled: Collection[Adapter]) -> None:
        """Give the tokens left over to truncated prompts, as far as there are slots and pages.

        descheduled: adapters whose sequences are not in this step.
        """
        counts, limits = self.counts, self._limits
        self.left = limits.max_num_batched_tokens - sum(counts.values())
        for request in self._truncated:
            count = counts.get(request, 0)
            if not request.is_running or request.adapter in descheduled:
                continue
            if not count and len(counts) >= limits.max_num_seqs:
                continue
            start = request.num_computed_tokens + count
            more = self.whole(request, start, self.most(request, self._next_chunk(request) - count))
            end = start + more
            if more > 0 and (request.room >= end or self._lifecycle.memory.grow(request, end)):
                self.take(request, more)

    def _next_chunk(self, request: Request) -> int:
        """The most tokens of a running request that a step may compute."""
        return self._lifecycle.memory.limit_chunk(request, request.num_computed_tokens, num_missing(request))

    def _schedule(self, request: Request, count: int) -> None:
        """Schedule `count` tokens of a running request if it gets pages; others, or itself, are preempted for them.

        Pages that have to be copied out first become free only later.
        """
        end, memory, lifecycle = request.num_computed_tokens + count, self._lifecycle.memory, self._lifecycle
        while request.room < end and not memory.grow(request, end):
            if lifecycle.store.give_up_loads():
                continue
            self.was_short = True
            if self._is_async or memory.swapped.frees_pages:
                return
            victim = lifecycle.service.last(self._running)
            lifecycle.preempt(victim)
            self.left += self.counts.pop(victim, 0)
            if victim is request:
                return
        self.take(request, count)

    def _prompt_shares(
        self, prompts: Sequence[Request], num_decoding: int, waiting: Collection[str]
    ) -> dict[str, int] | None:
        """Split the step's tokens by weight among tenants with a prompt under way; None if one tenant gets them all.

        The first waiting tenant without a request there counts, too.
        """
        wanted: Counter[str] = Counter()
        for request in prompts:
            wanted[request.fairness_key] += self._next_chunk(request)
        present = wanted if len(self._running) < self._limits.max_num_seqs else self._running.tenants
        newcomer = next((tenant for tenant in waiting if tenant not in present), None)
        if len(wanted) + (newcomer is not None) < 2 or not self._limits.chunked_prefill:
            return None
        weights, budget = self._limits.weights, max(0, self._limits.max_num_batched_tokens - num_decoding)
        if self.work is not None:
            budget = min(budget, self.work.room)
        level = max_min_level(budget, wanted, weights, 0.0 if newcomer is None else weights.get(newcomer, 1.0))
        return {each: math.ceil(min(want, level * weights.get(each, 1.0))) for each, want in wanted.items()}
