"""Builds the batch of one step: running requests first, then waiting ones.

Tests: tests/core/scheduling/test_service.py, tests/core/scheduling/test_scheduling.py, tests/simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ...memory.adapters.adapter import Adapter
from ..config import EngineConfig
from ..requests.request import Request
from .allocator import Allocator
from .lifecycle import Lifecycle
from .queue_order import QueueOrder
from .queues import Running
from .step_target import PromptWork
from .token_budget import TokenBudget


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
    """A step under construction.

    `TokenBudget` deals out tokens; the `Allocator` chooses who gives a slot, an adapter index or pages that a waiting
    request needs.
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
    """True while all candidates decode one token each; then `tokens.counts` has only admitted requests."""
    is_async: bool = False
    """True if the step before this one still runs. Nothing is preempted then; `was_short` is True where it would be."""

    work: PromptWork | None = None
    """What prompts may take of the step's time; None: anything."""

    admitted: set[Request] = field(default_factory=set)
    """Waiting requests that begin in this step."""
    descheduled: set[Adapter] = field(default_factory=set)
    """Adapters that gave their index to a request that begins."""
    num_sequences: int = 0
    overdue_before: float = 0.0
    """Requests that arrived before this time have been overtaken for long enough."""
    tokens: TokenBudget = field(init=False)
    slot_source: SlotSource = field(init=False)
    order: QueueOrder = field(init=False)
    """The candidates for the slot."""

    def __post_init__(self) -> None:
        self.tokens = TokenBudget(self.limits, self.running, self.lifecycle, self.work, is_async=self.is_async)

    @property
    def was_short(self) -> bool:
        """True if a request lacked pages that may be had in a later step."""
        return self.tokens.was_short

    def begin_admission(self) -> None:
        """Count the running requests' use, before waiting ones are admitted.

        If they use every slot, at least one token is left: a request that gets the slot of another can decode.
        """
        limits, counts = self.limits, self.tokens.counts
        self.overdue_before = self.now - limits.max_overtake_seconds
        self.num_sequences = len(self.candidates) if self.all_decode else len(counts)
        num_used = self.num_sequences if self.all_decode else sum(counts.values())
        self.tokens.begin_admission(num_used, may_borrow=self.num_sequences == limits.max_num_seqs)
        self.allocator.begin(self.candidates, self.admitted, self.now, self.eligible_adapters)

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
            self.tokens.take(request, count)
            self.allocator.take_slot(request.fairness_key)
        else:
            self.allocator.note_cost(request.fairness_key)

    def _free_step(self, work: PromptWork) -> None:
        """Leave out the prompts of tenants that owe time, as one that owes none begins a request."""
        work.free_step()
        if self.all_decode:  # then `counts` has admitted requests alone, and another running one counts as decoding
            decoding = [each for each in self.candidates if each not in self.admitted]
            self.tokens.counts = {**dict.fromkeys(decoding, 1), **self.tokens.counts}
            self.all_decode = False
        self.num_sequences -= self.tokens.drop_held()

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

    def preempt(self, victim: Request) -> None:
        """Preempt a running request for a waiting one; its tenant begins no more requests in this step."""
        self.lifecycle.preempt(victim)
        self.allocator.note_victim(victim)

    def keep_max_num_seqs(self) -> None:
        """Deschedule the running requests that lost their slot to admitted ones."""
        counts, gone = self.tokens.counts, self.descheduled
        present = [each for each in self.running if each.restoring is None and each.adapter not in gone]
        sharing = [each for each in present if self.all_decode or each in counts]
        chosen = self.lifecycle.service.choose(sharing, self.admitted)
        self.tokens.counts = {each: counts.get(each, 1) for each in chosen}
        self.all_decode = False

    def _deschedule(self, donor: Adapter) -> None:
        """Deschedule the sequences of an adapter that gave its index: their slots and tokens are free again."""
        self.descheduled.add(donor)
        num_sequences, tokens, candidates = self.num_sequences, self.tokens, set(self.candidates)
        for request in [each for each in self.running if each.adapter is donor]:
            is_new = request in self.admitted  # in this very step, before the request that takes the index
            count = tokens.counts.pop(request, int(self.all_decode and not is_new))
            tokens.left += count
            self.num_sequences -= bool(count)
            if count or (not is_new and request in candidates):
                self.allocator.drop_slot(request.fairness_key, is_new=is_new)
        if self.num_sequences < num_sequences:  # the new sequence has a slot; no other one is descheduled for it
            tokens.return_borrowed()
