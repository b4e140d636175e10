"""Admission control: the waiting requests that may begin.

Tests: tests/core/scheduling/test_scheduling.py, tests/core/scheduling/test_queue_order.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest

from ...memory.adapters.adapter import Adapter, Tier
from ...memory.adapters.store import AdapterStore
from ...memory.files.error import LoadFailure
from ...memory.pages.block import Block
from ..config import EngineConfig
from ..requests.request import Request, RequestState
from .allocator import Allocator
from .lifecycle import Lifecycle, load_error
from .load_ahead import LoadPolicy
from .queue_order import QueueOrder
from .queues import AdapterQueue, WaitingQueue
from .request_memory import RequestMemory
from .step_builder import SlotSource, StepBuilder

DOUBT_SECONDS = 10.0
"""After an adapter load misses its deadline, disable streamed starts for this many seconds: requests then start only
once their adapter has been read.
"""

MOST_SHORT = 2
"""Tenants that may lack pages in a step before its admission ends. Chosen."""

_MOST_QUEUES = 32
"""Adapters of a tenant searched for one to read, longest requested first."""


@dataclass(eq=False)
class Admission:
    """Admits waiting requests while tokens, slots and pages last.

    A subclass, such as the simulator's, may override its public methods.
    """

    limits: EngineConfig
    waiting: WaitingQueue
    store: AdapterStore
    memory: RequestMemory
    loads: LoadPolicy
    lifecycle: Lifecycle
    allocator: Allocator
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._prefills = SharedPrefills(self.memory, self.waiting)
        self.leaders = self._prefills.leaders
        """While there are any, `release_held_back` may forget one that has computed its prompt, or has ended."""
        self._max_num_seqs = self.limits.max_num_seqs
        self.late: set[Adapter] = set()
        """Adapters that missed their deadline: requests for them start only once they have been read."""
        self._doubt_until = 0.0

    def read_order(self) -> Iterator[Request]:
        """Yield the waiting requests in the order in which their adapters are to be read.

        If several tenants wait, requests for non-resident adapters come first, one of each tenant in order of turns,
        round robin: no tenant's adapter waits for the whole queue of another tenant.
        """
        tenants = self.waiting.tenants
        if len(tenants) > 1:
            turns = self.lifecycle.service.restart_turns()
            lines: list[Iterable[AdapterQueue]] = []
            while len(lines) < 2 * self.limits.lookahead and (tenant := turns.top()) is not None:
                lines.append(islice(tenants[tenant].values(), _MOST_QUEUES))
                turns.pass_over()
            for queue in chain.from_iterable(zip_longest(*lines)):
                if queue is not None and queue.adapter is not None and not queue.adapter.pages:
                    yield next(iter(queue))
        yield from self.waiting

    def release_held_back(self) -> None:
        """Release requests whose shared prefill is done, and forget late adapters that have been read.

        Needed only while a request waits or an adapter is late.
        """
        self._prefills.release_followers()
        if self.late:
            self.late = {adapter for adapter in self.late if adapter.requests and not is_read(self.store, adapter)}

    def note_late(self, adapter: Adapter) -> None:
        """Record an adapter that missed its deadline; no read estimate is trusted for `DOUBT_SECONDS`."""
        self.late.add(adapter)
        self._doubt_until = self.clock() + DOUBT_SECONDS

    def admit(self, builder: StepBuilder) -> None:
        """Move waiting requests to the running ones, in queue order.

        Requests for adapters that are not available yet are skipped. Admission stops at the first request that lacks
        tokens. Once one lacks pages, only tenants within their share of the pages begin more. None does if the tenant
        of that request is overdue for a turn and has no running request: small requests must not starve a large one.

        With every slot taken, a slot may still come from another `SlotSource`. Requests of one `choice_group` take
        turns in the slots that remain.
        """
        for request, blocks, count in self._candidates(builder):
            if self.fits(request, blocks, builder):
                self._start(request, blocks, count, builder)
            elif not self._find_room(request, builder):
                return

    # -- hooks

    def find_slot(self, builder: StepBuilder) -> SlotSource | None:
        """Return the source of a slot for one more request; None if there is none.

        While a mode policy excludes requests, or adapters have no index, up to `max_num_seqs` other requests may run;
        the excluded ones keep their pages.
        """
        most, running, waiting, allocator = self._max_num_seqs, builder.running, self.waiting, self.allocator
        if len(running) - allocator.count_left_out() < most:
            return SlotSource.FREE
        if builder.eligible_adapters is not None and builder.num_sequences < most:
            return SlotSource.FREE
        if allocator.any_may_take_index(waiting):
            return SlotSource.ADAPTER
        if allocator.any_may_take_slot(waiting.tenants.keys()):
            return SlotSource.TENANT
        if builder.num_sequences < most and running.num_groups < most and waiting.has_first_choices():
            return SlotSource.CHOICE
        return None

    def open_queue(self, builder: StepBuilder, slot_source: SlotSource) -> None:
        """Restart the step's candidates: the requests that may take a slot of this source."""
        is_doubtful = builder.now < self._doubt_until
        is_limited = self.limits.max_adapters_per_step is not None or builder.eligible_adapters is not None
        builder.slot_source = slot_source
        builder.order = QueueOrder(
            self.waiting,
            self.lifecycle.service.restart_turns(),
            self.store,
            overdue_before=builder.overdue_before,
            is_eligible=partial(self._is_adapter_eligible, builder) if is_limited or is_doubtful or self.late else None,
            may_begin=builder.may_begin,
            only_first_choices=slot_source is SlotSource.CHOICE,
        )

    def is_eligible(self, request: Request, builder: StepBuilder) -> bool:
        """True unless a request must wait for its adapter, or for an index in the step."""
        adapter = request.adapter
        if not self._is_adapter_eligible(builder, adapter, request):
            return False
        if adapter is None or (adapter.pages and adapter.transfer is None):
            return True
        return self.loads.may_start(adapter, min(request.num_tokens, builder.left))

    def fits(self, request: Request, blocks: list[Block], builder: StepBuilder) -> bool:
        """True if there are pages for a request's known tokens and for the expected growth of all running requests.

        blocks: its prefix in the prefix cache.
        """
        if not self.memory.fits(request, blocks):
            return False
        if not builder.running:
            return True
        fits, growth = self.memory.fits, self.allocator.growth
        return fits(request, blocks, growth.total_with(request)) or fits(request, blocks, growth.peak_with(request))

    # -- candidates

    def _candidates(self, builder: StepBuilder) -> Iterator[tuple[Request, list[Block], int]]:
        """Yield the requests that may begin if they get pages, each with its cached prefix and its number of tokens.

        The caller begins each of them, or passes it over.
        """
        if builder.left <= 0 or (slot_source := self.find_slot(builder)) is None:
            return
        self.open_queue(builder, slot_source)
        while (request := self._next(builder)) is not None:
            if self._prefills.wait_for_read(request):
                builder.order.advance()
                continue
            blocks = self.memory.match(request)
            kept = self.memory.kept_tokens(request, blocks)
            count = self.memory.limit_chunk(request, kept, request.num_tokens - kept)
            if count > builder.left and not self.limits.chunked_prefill:
                return
            if self._prefills.hold_back(request, kept) or self._prefills.wait_for_fetch(request, blocks):
                builder.order.advance()
            elif (fitting := builder.whole(request, kept, builder.most(request, count))) > 0:
                yield request, blocks, fitting
            else:
                return

    def _next(self, builder: StepBuilder) -> Request | None:
        """Return the next request with a slot, tokens, its adapter and a share of the pages; None if there is none."""
        while builder.left > 0 and self.allocator.num_short <= MOST_SHORT:
            request = builder.order.next()
            if request is None:
                if not self._try_next_source(builder):
                    return None
                continue
            slot_source = self.find_slot(builder)
            if slot_source is None:
                return None
            if slot_source is not builder.slot_source:
                self.open_queue(builder, slot_source)
            elif slot_source is SlotSource.CHOICE and request.choice_group in builder.running.choice_groups:
                return None  # another choice of its request runs
            elif not self.is_eligible(request, builder):
                builder.order.pass_over()
            elif self._is_within_share(request, builder):
                return request
        return None

    def _try_next_source(self, builder: StepBuilder) -> bool:
        """Try another source once no request is left that could take an adapter's index; False if there is none."""
        if builder.slot_source is not SlotSource.ADAPTER:
            return False
        self.allocator.keep_indices()
        slot_source = self.find_slot(builder)
        if slot_source is not None:
            self.open_queue(builder, slot_source)
        return slot_source is not None

    def _is_adapter_eligible(self, builder: StepBuilder, adapter: Adapter | None, head: Request | None) -> bool:
        """True if an adapter, or the base model (None), may join the step.

        head: a tenant's first request that waits for it. An overdue head may get the index of another adapter.
        """
        eligible, allocator = builder.eligible_adapters, self.allocator
        if eligible is not None and adapter not in eligible:
            return False
        if adapter is not None and allocator.lacks_index(adapter):
            if head is None:
                return bool(allocator.index_donors)
            return is_read(self.store, adapter) and allocator.may_take_index(adapter, head)
        if adapter is None or builder.slot_source is SlotSource.ADAPTER:
            return builder.slot_source is not SlotSource.ADAPTER
        is_doubted = adapter in self.late or (not adapter.pages and builder.now < self._doubt_until)
        return not is_doubted or is_read(self.store, adapter)

    # -- pages

    def _is_within_share(self, request: Request, builder: StepBuilder) -> bool:
        """True unless pages are short and a tenant would exceed its share of them; then the tenant is passed over.

        A tenant that is overdue for a turn may exceed its share.
        """
        tenant, allocator = request.fairness_key, self.allocator
        if not allocator.num_short or builder.is_overdue(tenant) or allocator.is_within_share(request):
            return True
        allocator.bar(tenant)
        return False

    def _find_room(self, request: Request, builder: StepBuilder) -> bool:
        """Free pages for a request that lacks them, or skip or fail it; False ends the step's admission."""
        if self.store.give_up_loads():
            return True
        tenant, allocator = request.fairness_key, self.allocator
        if builder.is_async and (allocator.may_take_slot(tenant) or allocator.beyond_shares(request)):
            builder.was_short = True
            return False
        if victims := allocator.find_victims(request, is_overdue=builder.is_overdue(tenant)):
            for victim in victims:
                builder.preempt(victim)
            return not self.memory.swapped.frees_pages  # if so, the pages are free only after the copy
        if builder.running or self.store.loads.under_way:
            allocator.bar(tenant)
            return not builder.is_overdue(tenant)
        message = "the page pool has too few pages left beside pinned adapters; unpin some"
        self.lifecycle.end(request, message, LoadFailure.NO_ROOM)
        builder.order.advance()
        return True

    # -- start

    def _start(self, request: Request, blocks: list[Block], count: int, builder: StepBuilder) -> None:
        """Start a waiting request with `count` tokens; with none while its KV is restored from host memory.

        It stays a candidate if its KV could not be copied from there. An adapter that can't be loaded fails this
        request only.
        """
        if request.start_time is None:
            request.start_time = self.clock()
        try:
            if not self.memory.start(request, blocks, count):
                return  # it is a candidate again, with less of its KV
        except Exception as error:
            self.lifecycle.end(request, *load_error(request, error))
            builder.order.advance()
            return
        self.waiting.remove(request)
        builder.order.advance()
        request.state = RequestState.LOADING if is_loading(request) else RequestState.RUNNING
        request.began_at = request.num_known_blocks * self.memory.block_tokens
        self._prefills.begin(request)
        length = self.lifecycle.service.lengths.final_length(request)
        builder.admit(request, 0 if request.restoring is not None else count, length)


def is_loading(request: Request) -> bool:
    """True while a running request's adapter is being loaded, or its KV is being restored."""
    return request.restoring is not None or (request.adapter is not None and request.adapter.transfer is not None)


def is_read(store: AdapterStore, adapter: Adapter) -> bool:
    """True if nothing of an adapter is still to be read from disk."""
    return store.tier(adapter) not in (Tier.DISK, Tier.LOADING)


@dataclass(eq=False)
class SharedPrefills:
    """Holds back waiting requests while a running one, their leader, computes the same prompt.

    They wait no longer than its prefill takes: anything that delays it, such as a full step, would delay them too. When
    the leader ends, is aborted or is preempted, they are candidates again, and the first of them becomes the leader.
    """

    _memory: RequestMemory
    _waiting: WaitingQueue
    leaders: dict[object, Request] = field(default_factory=dict)
    """By what tells their prompts apart: those that compute one, and those that did until `release_followers`."""
    _followers: dict[Request, list[Request]] = field(default_factory=dict)
    _fetched: dict[Request, list[Request]] = field(default_factory=dict)
    _reading: list[Request] = field(default_factory=list)

    def hold_back(self, request: Request, num_tokens: int) -> bool:
        """Hold a request back if another one computes its prompt. num_tokens: tokens of it that have KV already."""
        if not self.leaders or self._memory.shareable(request) <= num_tokens or request.needs_prompt_states:
            return False
        leader = self.leaders.get(self._key(request))
        if leader is None or not self._leads(leader) or not _has_same_prompt(leader, request):
            return False
        self._waiting.hold_back(request)
        self._followers.setdefault(leader, []).append(request)
        return True

    def wait_for_read(self, request: Request) -> bool:
        """Hold a request back while its prompt's blocks are being read from files, if that is worth it."""
        if request.reading is None or not self._memory.is_read_ahead(request):
            return False
        self._waiting.hold_back(request)
        self._reading.append(request)
        return True

    def wait_for_fetch(self, request: Request, blocks: list[Block]) -> bool:
        """Hold a request back if another one is copying the blocks that it begins with from host memory."""
        other = self._memory.fetched_by(blocks)
        if other is None:
            return False
        self._waiting.hold_back(request)
        self._fetched.setdefault(other, []).append(request)
        return True

    def begin(self, request: Request) -> None:
        """Make an admitted request the leader of its prompt, if there is none."""
        if request.caching and self._leads(request):
            self.leaders.setdefault(self._key(request), request)

    def release_followers(self) -> None:
        """Release a leader's followers once it has computed the prompt, or copied it, or never will."""
        for request in [each for each in self._reading if not self._memory.is_read_ahead(each)]:
            self._reading.remove(request)
            self._waiting.release(request)
        for fetching in [each for each in self._fetched if each.fetch is None]:
            for request in reversed(self._fetched.pop(fetching)):
                self._waiting.release(request)
        for key, leader in list(self.leaders.items()):
            if not self._leads(leader):
                del self.leaders[key]
                for request in reversed(self._followers.pop(leader, ())):
                    self._waiting.release(request)

    def _leads(self, leader: Request) -> bool:
        known = leader.num_known_blocks * self._memory.block_tokens
        return leader.is_running and leader.caching and known < self._memory.shareable(leader)

    def _key(self, request: Request) -> object:
        if request.prompt_hash is None:
            request.prompt_hash = hash(tuple(request.keys(0, request.num_prompt_tokens)))
        return request.adapter, self._memory.scope(request), request.prompt_hash


def _has_same_prompt(one: Request, other: Request) -> bool:
    count = one.num_prompt_tokens
    return count == other.num_prompt_tokens and one.keys(0, count) == other.keys(0, count)
