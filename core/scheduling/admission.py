"""Admission control: the waiting requests that may begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest

from ...memory.adapters.adapter import Adapter, Tier
from ...memory.adapters.store import AdapterStore
from ...memory.files.error import LoadFailure
from ...memory.pages.prefix import Block
from ..config import EngineConfig
from ..requests.request import Request, RequestState
from .lifecycle import Lifecycle, load_error
from .load_ahead import LoadPolicy
from .output_lengths import Growth
from .queues import AdapterQueue, WaitingQueue
from .request_memory import RequestMemory
from .shares import PageShares
from .step_builder import QueueOrder, SlotSource, StepBuilder

DOUBT_SECONDS = 10.0
"""After an adapter load misses its deadline, disable streamed starts for this many seconds: requests then start only
once their adapter has been read.
"""

MOST_SHORT = 2
"""Tenants that may lack pages in a step before its admission ends. Chosen."""

_MOST_GROUPS = 32
"""Adapters of a tenant searched for one to read, longest requested first."""


@dataclass(eq=False)
class Admission:
    """Admits waiting requests while tokens, slots and pages last."""

    _limits: EngineConfig
    _waiting: WaitingQueue
    _store: AdapterStore
    _memory: RequestMemory
    _loads: LoadPolicy
    _lifecycle: Lifecycle
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._prefills = SharedPrefills(self._memory, self._waiting)
        self._max_num_seqs = self._limits.max_num_seqs
        self.late: set[Adapter] = set()  # missed their deadline: requests start only once they have been read
        self._doubt_until = 0.0
        self._pages = PageShares(self._limits, self._waiting, self._memory, self._loads.costs)

    def read_order(self) -> Iterator[Request]:
        """Yield the waiting requests in the order in which their adapters are to be read.

        Where several tenants wait, requests for non-resident adapters come first, one of each tenant in order of turns,
        round robin: no tenant's adapter waits behind another tenant's whole queue.
        """
        tenants = self._waiting.tenants
        if len(tenants) > 1:
            turns = self._lifecycle.service.restart_turns()
            lines: list[Iterable[AdapterQueue]] = []
            while len(lines) < 2 * self._limits.lookahead and (tenant := turns.top()) is not None:
                lines.append(islice(tenants[tenant].values(), _MOST_GROUPS))
                turns.pass_over()
            for group in chain.from_iterable(zip_longest(*lines)):
                if group is not None and group.adapter is not None and not group.adapter.pages:
                    yield next(iter(group))
        yield from self._waiting

    def release_held_back(self) -> None:
        """Release requests held for a shared prefill that is done, and forget late adapters that have been read.

        Needed only while a request waits or an adapter is late.
        """
        self._prefills.release_followers()
        if self.late:
            self.late = {adapter for adapter in self.late if adapter.requests and not is_read(self._store, adapter)}

    def note_late(self, adapter: Adapter) -> None:
        """Record an adapter that missed its deadline; no read estimate is trusted for `DOUBT_SECONDS`."""
        self.late.add(adapter)
        self._doubt_until = self._clock() + DOUBT_SECONDS

    def admit(self, builder: StepBuilder) -> None:
        """Move waiting requests to the running ones, in queue order.

        Requests for adapters not yet available are skipped. Admission stops at the first request that lacks tokens.
        Once one lacks pages, only tenants within their share of the pages begin more, and none if its tenant is overdue
        for a turn and has no running request, so that small requests don't starve a large one. With every slot taken,
        three kinds of request may still begin. A request that is overdue for an index of the batch takes an adapter's,
        with its rows. A tenant without a row, or that was served less, takes over a row of another
        (`StepBuilder.may_begin`). A call with no running answer takes a row while the step has one; answers of calls
        with n > 1 then take turns.
        """
        for request, blocks, count in self._candidates(builder):
            if self.has_room(request, blocks, builder):
                self._start(request, blocks, count, builder)
            elif not self._find_room(request, builder):
                return

    def _candidates(self, builder: StepBuilder) -> Iterator[tuple[Request, list[Block], int]]:
        """Yield the requests that may begin if they get pages, each with its cached prefix and its tokens of the
        budget. After each, the caller begins or passes over it.
        """
        if builder.budget <= 0 or (slot_source := self.find_slot(builder)) is None:
            return
        if self._pages.recipient in self._waiting:
            builder.donors = self._pages.donors(builder.now)
        self.open_queue(builder, slot_source)
        while (request := self._next(builder)) is not None:
            blocks = self._memory.match(request)
            kept = self._memory.kept_tokens(request, blocks)
            count = request.num_tokens - kept
            if count > builder.budget and not self._limits.chunked_prefill:
                return
            if self._prefills.hold_back(request, kept):
                builder.order.go_on()
            else:
                yield request, blocks, min(count, builder.budget)

    def _next(self, builder: StepBuilder) -> Request | None:
        """Return the next request with a slot, tokens, its adapter and a share of the pages; None if there is none."""
        while builder.budget > 0 and builder.num_short <= MOST_SHORT:
            request = builder.order.next()
            if request is None:
                if not self._go_on(builder):
                    return None
                continue
            slot_source = self.find_slot(builder)
            if slot_source is None or (
                slot_source is builder.slot_source is SlotSource.CHOICE
                and request.choice_group in builder.running.choice_groups
            ):
                return None  # its call has a row
            if slot_source is not builder.slot_source:
                self.open_queue(builder, slot_source)
            elif not self.may_join(request, builder):
                builder.order.pass_over()
            elif self._has_share(request, builder):
                return request
        return None

    def _go_on(self, builder: StepBuilder) -> bool:
        """Go on to another kind of slot once nobody is left to take an adapter's index; False if there is none."""
        if builder.slot_source is not SlotSource.ADAPTER:
            return False
        builder.may_displace = False
        slot_source = self.find_slot(builder)
        if slot_source is not None:
            self.open_queue(builder, slot_source)
        return slot_source is not None

    def _has_share(self, request: Request, builder: StepBuilder) -> bool:
        """True unless pages are short, and its tenant would go beyond its share of them, is not owed a turn, and is
        passed over.
        """
        if not builder.num_short or builder.is_overdue(request.fairness_key):
            return True
        if self._pages.is_within_share(request, builder.running, self._growth(builder)):
            return True
        builder.pass_over_tenant(request.fairness_key)
        return False

    def find_slot(self, builder: StepBuilder) -> SlotSource | None:
        """Return the kind of slot that one more request may take; None if there is none. While a mode policy excludes
        requests, or adapters have no index, up to `max_num_seqs` others may run; the excluded keep their pages.
        """
        slots, running, waiting = self._max_num_seqs, builder.running, self._waiting
        if len(running) - builder.num_without_index < slots or (
            builder.eligible_adapters is not None and builder.num_sequences < slots
        ):
            return SlotSource.FREE
        if builder.is_open_to_adapters(waiting):
            return SlotSource.ADAPTER
        if builder.is_open_to(waiting.tenants.keys()):
            return SlotSource.TENANT
        if builder.num_sequences < slots and running.num_groups < slots and waiting.has_first_choices():
            return SlotSource.CHOICE
        return None

    def _find_room(self, request: Request, builder: StepBuilder) -> bool:
        """Free pages for a request that lacks them, or skip or fail it; False ends the step's admission."""
        if self._store.give_up_loads():
            return True
        if builder.is_async and (builder.may_begin(request.fairness_key) or self._beyond_shares(request, builder)):
            builder.was_short = True
            return False
        if victims := self._find_victims(request, builder):
            for victim in victims:
                self._lifecycle.preempt(victim)
                builder.lose(victim)
            return not self._memory.swapped.frees_pages  # if so, the pages are free only after the copy
        if builder.running or self._store.loads.under_way:
            builder.pass_over_tenant(request.fairness_key)
            return not builder.is_overdue(request.fairness_key)
        message = "the arena has too few pages left beside pinned adapters; unpin some"
        self._lifecycle.end(request, message, LoadFailure.NO_ROOM)
        builder.order.go_on()
        return True

    def _find_victims(self, request: Request, builder: StepBuilder) -> list[Request]:
        """Return the requests to preempt for one that lacks pages.

        First a paused request, for any tenant that may take over a row (`StepBuilder.may_begin`); then running ones,
        for a tenant below its share of the pages; then one, for an overdue tenant with no running request.
        """
        tenant, may_begin = request.fairness_key, builder.may_begin(request.fairness_key)
        if may_begin and (paused := builder.last_descheduled(tenant)) is not None:
            return [paused]
        if victims := self._beyond_shares(request, builder):
            self._pages.record_victims(request, victims, builder.now)
            return victims
        return [victim] if may_begin and builder.is_overdue(tenant) and (victim := builder.last()) is not None else []

    def _beyond_shares(self, request: Request, builder: StepBuilder) -> list[Request]:
        """Return the requests to preempt for one that lacks pages within its tenant's share."""
        return self._pages.find_victims(request, builder.running, self._growth(builder), builder.now, builder.from_end)

    def open_queue(self, builder: StepBuilder, slot_source: SlotSource) -> None:
        """Restart the step's candidates: the requests that may take this kind of slot."""
        doubts = builder.now < self._doubt_until
        is_limited = (
            self._limits.max_adapters_per_step is not None
            or doubts
            or self.late
            or builder.eligible_adapters is not None
        )
        builder.slot_source = slot_source
        builder.order = QueueOrder(
            self._waiting,
            self._lifecycle.service.restart_turns(),
            self._store,
            builder.overdue_before,
            partial(self._may_come, builder) if is_limited else None,
            slot_source is SlotSource.CHOICE,
            builder.is_candidate,
        )

    def _may_come(self, builder: StepBuilder, adapter: Adapter | None, head: Request | None) -> bool:
        """True if an adapter, or the base model, may join the step.

        head: a tenant's first request that waits for it; an overdue head may take another adapter's index.
        """
        if builder.eligible_adapters is not None and adapter not in builder.eligible_adapters:
            return False
        if adapter is not None and builder.lacks_index(adapter):
            if head is None:
                return builder.has_index_to_give
            return is_read(self._store, adapter) and builder.may_take_index(adapter, head)
        if adapter is None or builder.slot_source is SlotSource.ADAPTER:
            return builder.slot_source is not SlotSource.ADAPTER
        is_doubted = adapter in self.late or (not adapter.pages and builder.now < self._doubt_until)
        return not is_doubted or is_read(self._store, adapter)

    def may_join(self, request: Request, builder: StepBuilder) -> bool:
        """True unless a request must wait for its adapter or for a free index in the step."""
        adapter = request.adapter
        if not self._may_come(builder, adapter, request):
            return False
        if adapter is None or (adapter.pages and adapter.transfer is None):
            return True
        return self._loads.may_start(adapter, min(request.num_tokens, builder.budget))

    def has_room(self, request: Request, blocks: list[Block], builder: StepBuilder) -> bool:
        """True if there are pages for a request's known tokens and for the expected growth of all running requests.

        blocks: its prefix in the prefix cache.
        """
        if not self._memory.fits(request, blocks):
            return False
        if not builder.running:
            return True
        fits, growth = self._memory.fits, self._growth(builder)
        return fits(request, blocks, growth.total_with(request)) or fits(request, blocks, growth.peak_with(request))

    def _growth(self, builder: StepBuilder) -> Growth:
        """Return the pages that the step's running requests are expected to grow by."""
        if builder.growth is None:
            builder.growth = Growth(self._lifecycle.lengths, self._memory.block_tokens, builder.running)
        return builder.growth

    def _start(self, request: Request, blocks: list[Block], count: int, builder: StepBuilder) -> None:
        """Start a waiting request with `count` tokens; none while its KV is copied back from host memory.

        An adapter that can't be loaded fails this request only.
        """
        if request.start_time is None:
            request.start_time = self._clock()
        try:
            self._memory.start(request, blocks, count)
        except Exception as error:
            self._lifecycle.end(request, *load_error(request, error))
            builder.order.go_on()
            return
        self._waiting.remove(request)
        builder.order.go_on()
        if request is self._pages.recipient:
            self._pages.recipient = None
        request.state = RequestState.LOADING if is_loading(request) else RequestState.RUNNING
        request.began_at = len(blocks) * self._memory.block_tokens
        self._prefills.begin(request)
        builder.begin(
            request, 0 if request.restoring is not None else count, self._lifecycle.lengths.final_length(request)
        )


@dataclass(eq=False)
class SharedPrefills:
    """Holds back waiting requests while a running one, their leader, computes the same prompt.

    They wait no longer than its prefill takes: whatever delays that, such as a full step, would delay them too. When
    the leader ends, is aborted or is preempted, they are candidates again, and the first of them becomes the leader.
    """

    _memory: RequestMemory
    _waiting: WaitingQueue
    _leaders: dict[object, Request] = field(default_factory=dict)
    _followers: dict[Request, list[Request]] = field(default_factory=dict)

    def hold_back(self, request: Request, num_tokens: int) -> bool:
        """Hold a request back if another is computing its prompt; the KV of `num_tokens` of it is there already."""
        if not self._leaders or self._shareable(request) <= num_tokens:
            return False
        leader = self._leaders.get(self._key(request))
        if leader is None or not self._leads(leader) or not _same_prompt(leader, request):
            return False
        self._waiting.hold_back(request)
        self._followers.setdefault(leader, []).append(request)
        return True

    def begin(self, request: Request) -> None:
        """Make an admitted request the leader of its prompt, if there is none."""
        if request.caching and self._leads(request):
            self._leaders.setdefault(self._key(request), request)

    def release_followers(self) -> None:
        """Release a leader's followers once it has computed the prompt, or never will."""
        for key, leader in list(self._leaders.items()):
            if not self._leads(leader):
                del self._leaders[key]
                for request in reversed(self._followers.pop(leader, ())):
                    self._waiting.release(request)

    def _leads(self, leader: Request) -> bool:
        known = leader.num_known_blocks * self._memory.block_tokens
        return leader.is_running and leader.caching and known < self._shareable(leader)

    def _shareable(self, request: Request) -> int:
        """Return how many prompt tokens lie in full blocks that an equal prompt could start from."""
        return (request.num_prompt_tokens - 1) // self._memory.block_tokens * self._memory.block_tokens

    def _key(self, request: Request) -> object:
        if request.prompt_hash is None:
            request.prompt_hash = hash(tuple(request.token_ids[: request.num_prompt_tokens]))
        return request.adapter, self._memory.scope(request), request.prompt_hash


def _same_prompt(one: Request, other: Request) -> bool:
    count = one.num_prompt_tokens
    return count == other.num_prompt_tokens and one.token_ids[:count] == other.token_ids[:count]


def is_loading(request: Request) -> bool:
    """True while a running request's adapter is being loaded, or its KV is being copied back."""
    return request.restoring is not None or (request.adapter is not None and request.adapter.transfer is not None)


def is_read(store: AdapterStore, adapter: Adapter) -> bool:
    """True if nothing of an adapter is still to be read from disk."""
    return store.tier(adapter) not in (Tier.DISK, Tier.LOADING)
