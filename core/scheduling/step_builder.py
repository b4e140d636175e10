"""Builds the batch of one step: running requests first, then waiting ones.

Tests: tests/core/scheduling/test_service.py, tests/core/scheduling/test_scheduling.py, tests/simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ...memory.adapters.adapter import Adapter
from ..config import EngineConfig
from ..requests.request import Request
from .allocator import Allocator
from .lifecycle import Lifecycle
from .queue_order import QueueOrder
from .queues import Running, num_missing, split_prompts
from .service import max_min_level
from .step_target import PromptWork


class SlotSource(Enum):
    """Where the slot of the next admitted request comes from."""

    FREE = auto()
    """A free slot."""
    TENANT = auto()
    """A tenant that was served more."""
    CHOICE = auto()
    """A request with several choices, for a request without a running choice."""
    ADAPTER = auto()
    """An adapter that gives its index to an overdue one."""


@dataclass(eq=False, slots=True, kw_only=True)
class StepBuilder:
    """A step under construction: deals out its `max_num_batched_tokens`.

    The `Allocator` chooses who gives a slot, an adapter index or pages that a waiting request needs.
    """

    limits: EngineConfig
    lifecycle: Lifecycle
    allocator: Allocator
    running: Running
    """All running requests; admitted ones are added."""
    candidates: Sequence[Request]
    """The running requests that may have a sequence in this step."""
    now: float
    eligible_adapters: Collection[Adapter | None] | None = None
    """Adapters that may run (None: the base model); None: all."""
    all_decode: bool = False
    """True while all candidates decode one token each; then `counts` has only admitted requests."""
    is_async: bool = False
    """True if the step before this one still runs. Nothing is preempted then; `was_short` is True where it would be."""

    work: PromptWork | None = None
    """What prompts may take of the step's time; None: anything."""

    counts: dict[Request, int] = field(default_factory=dict)
    """Tokens of each scheduled request."""
    left: int = 0
    """Tokens that are not dealt out yet."""
    was_short: bool = False
    """True if a request lacked pages that may be had in a later step."""
    admitted: set[Request] = field(default_factory=set)
    """Waiting requests that begin in this step."""
    descheduled: set[Adapter] = field(default_factory=set)
    """Adapters that gave their index to a request that begins."""
    num_sequences: int = 0
    overdue_before: float = 0.0
    """Requests that arrived before this time have been overtaken for long enough."""
    slot_source: SlotSource = field(init=False)
    order: QueueOrder = field(init=False)
    """The candidates for the slot."""
    _borrowed: int = 0  # tokens of `left` beyond the budget, which a descheduled sequence will give back
    _truncated: list[Request] = field(default_factory=list)  # prompts that got less than their rest

    # -- tokens of running requests

    def schedule_running(self, requests: Sequence[Request], waiting: Collection[str]) -> None:
        """Deal tokens to running requests until they are used up. waiting: tenants with waiting requests.

        Decoding requests come first, hence long prompts never delay them; then prompts in order of admission.
        """
        prompts, decoding = split_prompts(requests)
        self.left = self.limits.max_num_batched_tokens
        if len(decoding) <= self.left and self.lifecycle.memory.grow_by_one(decoding):
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
        if self.limits.max_adapters_per_step is None or len(prompts) < 2:
            return set()
        decoding = {request.adapter for request in self.counts}
        return {request.adapter for request in prompts} - decoding - {None}

    def _prompt_shares(
        self, prompts: Sequence[Request], num_decoding: int, waiting: Collection[str]
    ) -> dict[str, int] | None:
        """Split the step's tokens by weight among tenants with a prompt under way; None if one tenant gets them all.

        The first waiting tenant without a request there counts, too.
        """
        wanted: Counter[str] = Counter()
        for request in prompts:
            wanted[request.fairness_key] += self._next_chunk(request)
        present = wanted if len(self.running) < self.limits.max_num_seqs else self.running.tenants
        newcomer = next((tenant for tenant in waiting if tenant not in present), None)
        if len(wanted) + (newcomer is not None) < 2 or not self.limits.chunked_prefill:
            return None
        weights, budget = self.limits.weights, max(0, self.limits.max_num_batched_tokens - num_decoding)
        if self.work is not None:
            budget = min(budget, self.work.room)
        level = max_min_level(budget, wanted, weights, 0.0 if newcomer is None else weights.get(newcomer, 1.0))
        return {each: math.ceil(min(want, level * weights.get(each, 1.0))) for each, want in wanted.items()}

    def _count(self, request: Request, wanted: int, shares: dict[str, int] | None) -> int:
        """How many of `wanted` tokens a running request gets. shares: of tenants with prompts, which are charged."""
        count, start, tenant = self.most(request, wanted), request.num_computed_tokens, request.fairness_key
        if shares is None or num_missing(request) <= 1:
            return self.whole(request, start, count)
        count = self.whole(request, start, min(count, max(0, shares[tenant])))
        shares[tenant] -= count
        return count

    def _next_chunk(self, request: Request) -> int:
        """The most tokens of a running request that a step may compute."""
        return self.lifecycle.memory.limit_chunk(request, request.num_computed_tokens, num_missing(request))

    def _schedule(self, request: Request, count: int) -> None:
        """Schedule `count` tokens of a running request if it gets pages; others, or itself, are preempted for them.

        Pages that have to be copied out first become free only later.
        """
        end, memory, lifecycle = request.num_computed_tokens + count, self.lifecycle.memory, self.lifecycle
        while request.room < end and not memory.grow(request, end):
            if lifecycle.store.give_up_loads():
                continue
            self.was_short = True
            if self.is_async or memory.swapped.frees_pages:
                return
            victim = lifecycle.service.last(self.running)
            lifecycle.preempt(victim)
            self.left += self.counts.pop(victim, 0)
            if victim is request:
                return
        self._take(request, count)

    # -- tokens of any request

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

    def _take(self, request: Request, count: int) -> None:
        """Record that the step computes `count` tokens of a request, which are not of `counts` yet."""
        self.counts[request] = self.counts.get(request, 0) + count
        self.left -= count
        has_prompt = num_missing(request) > 1 or request.num_computed_tokens < request.num_prompt_tokens
        if self.work is not None and has_prompt:
            self.work.take(request, count)

    def extend_truncated(self) -> None:
        """Give the tokens left over to truncated prompts, as far as there are slots and pages."""
        counts, limits = self.counts, self.limits
        self.left = limits.max_num_batched_tokens - sum(counts.values())
        for request in self._truncated:
            count = counts.get(request, 0)
            if not request.is_running or request.adapter in self.descheduled:
                continue
            if not count and len(counts) >= limits.max_num_seqs:
                continue
            start = request.num_computed_tokens + count
            more = self.whole(request, start, self.most(request, self._next_chunk(request) - count))
            end = start + more
            if more > 0 and (request.room >= end or self.lifecycle.memory.grow(request, end)):
                self._take(request, more)

    # -- waiting requests

    def begin_admission(self) -> None:
        """Count the running requests' use, before waiting ones are admitted.

        If they use every slot, at least one token is left: a request that gets the slot of another can decode.
        """
        limits, counts = self.limits, self.counts
        self.overdue_before = self.now - limits.max_overtake_seconds
        self.num_sequences = len(self.candidates) if self.all_decode else len(counts)
        left = limits.max_num_batched_tokens - (self.num_sequences if self.all_decode else sum(counts.values()))
        self._borrowed = int(left <= 0 and self.num_sequences == limits.max_num_seqs)
        self.left = left + self._borrowed
        self.allocator.begin(self.candidates, self.admitted, self.now, self.eligible_adapters)

    def may_begin(self, tenant: str) -> bool:
        """True if a tenant, the first in turn, may begin a request in a slot of the present source."""
        if not self.allocator.may_begin(tenant, is_overdue=self.is_overdue(tenant)):
            return False
        if self.work is not None and tenant in self.work.held and not self.order.turns.is_overdue:
            return False
        return self.slot_source is not SlotSource.TENANT or self.allocator.may_take_slot(tenant)

    def is_overdue(self, tenant: str) -> bool:
        """True if a tenant, the first in turn, is overdue for it and has no running request."""
        return self.order.turns.is_overdue and tenant not in self.running.tenants

    def admit(self, request: Request, count: int, length: int) -> None:
        """Begin a waiting request with `count` tokens (0: it is in no step yet), and charge its tenant.

        length: tokens that it is expected to end with.
        """
        self.running.append(request)
        self.admitted.add(request)
        self.lifecycle.service.begin(request, length - 1)
        self.allocator.take_pages(request)
        if request.adapter is not None and (donor := self.allocator.take_index(request.adapter)) is not None:
            self._deschedule(donor)
        self.num_sequences += 1
        if count:
            if self.work is not None and self.work.frees_step(request.fairness_key):
                self._free_step(self.work)
            self._take(request, count)
            self.allocator.take_slot(request.fairness_key)
        else:
            self.allocator.note_cost(request.fairness_key)

    def _free_step(self, work: PromptWork) -> None:
        """Leave out the prompts of tenants that owe time, as one that owes none begins a request."""
        work.free_step()
        if self.all_decode:  # then `counts` has admitted requests alone, and another running one counts as decoding
            decoding = [each for each in self.candidates if each not in self.admitted]
            self.counts = {**dict.fromkeys(decoding, 1), **self.counts}
            self.all_decode = False
        for request in [each for each in self.counts if num_missing(each) > 1 and each.fairness_key in work.held]:
            self.left += self.counts.pop(request)
            self.num_sequences -= 1
        self._truncated = [each for each in self._truncated if each.fairness_key not in work.held]

    def preempt(self, victim: Request) -> None:
        """Preempt a running request for a waiting one; its tenant begins no more requests in this step."""
        self.lifecycle.preempt(victim)
        self.allocator.note_victim(victim)

    def keep_max_num_seqs(self) -> None:
        """Deschedule the running requests that lost their slot to admitted ones."""
        counts, gone = self.counts, self.descheduled
        present = [each for each in self.running if each.restoring is None and each.adapter not in gone]
        sharing = [each for each in present if self.all_decode or each in counts]
        chosen = self.lifecycle.service.choose(sharing, self.admitted)
        self.counts = {each: counts.get(each, 1) for each in chosen}
        self.all_decode = False

    def _deschedule(self, donor: Adapter) -> None:
        """Deschedule the sequences of an adapter that gave its index: their slots and tokens are free again."""
        self.descheduled.add(donor)
        num_sequences, candidates = self.num_sequences, set(self.candidates)
        for request in [each for each in self.running if each.adapter is donor]:
            is_new = request in self.admitted  # in this very step, before the request that takes the index
            count = self.counts.pop(request, int(self.all_decode and not is_new))
            self.left += count
            self.num_sequences -= bool(count)
            if count or (not is_new and request in candidates):
                self.allocator.drop_slot(request.fairness_key, is_new=is_new)
        if self.num_sequences < num_sequences:  # the new sequence has a slot; no other one is descheduled for it
            self.left -= self._borrowed
            self._borrowed = 0
