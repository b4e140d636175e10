"""Admission control: the waiting requests that may begin."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, islice, zip_longest

from ...memory.adapters.adapter import Adapter, Tier
from ...memory.adapters.store import AdapterStore
from ...memory.files.error import AdapterFormatError, LoadFailure
from ...memory.pages.prefix import Block
from ...memory.transfers.transfer import ExecutorLost
from ..config import EngineConfig
from ..requests.request import Request, RequestState
from .load_ahead import LoadPolicy
from .output_lengths import Growth, OutputLengths
from .page_shares import PageShares
from .policies import QueuePolicy, VictimPolicy
from .queue_order import QueueOrder, Turns
from .request_memory import RequestMemory
from .running import Running
from .seat_shares import SeatShares
from .waiting import Group, WaitingQueue

logger = logging.getLogger(__name__)

DOUBT_SECONDS = 10.0
"""After an adapter load misses its deadline, disable streamed starts for this many seconds: requests then start only
once their adapter has been read.
"""

MOST_SHORT = 2
"""Tenants that may lack pages in a step before its admission ends. Chosen."""

_MOST_GROUPS = 32
"""Adapters of a tenant searched for one to read, longest requested first."""


class Place(Enum):
    """The slot that a request may take in a step: a free one, or the row of another tenant or call."""

    SEAT = auto()
    ACCOUNT = auto()  # from a tenant that was served more, see `SeatShares`
    CALL = auto()  # from a call with several answers, for a call with no running answer


@dataclass(eq=False)
class Admission:
    """Admits waiting requests while tokens, slots and pages last.

    _num_steps: steps so far. _fail: ends a request that is in no queue, with an error message and the cause of a failed
    adapter load. _preempt: sends a running request back to the queue.
    """

    _limits: EngineConfig
    _waiting: WaitingQueue
    _policy: QueuePolicy
    _store: AdapterStore
    _memory: RequestMemory
    _loads: LoadPolicy
    _lengths: OutputLengths
    _shares: SeatShares
    _victims: VictimPolicy
    _clock: Callable[[], float]
    _num_steps: Callable[[], int]
    _fail: Callable[[Request, str, LoadFailure | None], None]
    _preempt: Callable[[Request], None]

    def __post_init__(self) -> None:
        self._prefills = SharedPrefills(self._memory, self._waiting)
        self._seats = self._limits.max_num_seqs
        self._turns = Turns(self._limits, self._waiting, self._policy)
        self.late: set[Adapter] = set()  # missed their deadline: requests start only once they have been read
        self.only: Collection[Adapter | None] | None = None  # adapters eligible for admission; None: all
        self._doubt_until = 0.0
        self._pages = PageShares(self._limits, self._waiting, self._memory, self._loads.costs, self._shares)

    def arrive(self, account: str) -> None:
        """If a tenant's queue was empty, enter the tenant with the policy and in the order of turns."""
        accounts = self._waiting.accounts
        if account not in accounts and not self._prefills.holds(account):
            now, step = self._clock(), self._num_steps()
            self._policy.arrive(account, accounts, self._turns.least(now, step))
            self._turns.take(account, now, step)

    def end(self, request: Request) -> None:
        """Charge the tenant of a request that has left the running ones for what it has computed."""
        expected = request.charged
        self._policy.settle(request)
        self._shares.end(request, expected)
        self._turns.note(request.account)

    def coming(self) -> Iterator[Request]:
        """Yield the waiting requests in the order in which their adapters are to be read.

        Where several tenants wait, requests for non-resident adapters come first, one of each tenant in order of turns,
        round robin: no tenant's adapter waits behind another tenant's whole queue.
        """
        accounts, turns = self._waiting.accounts, self._turns
        if len(accounts) > 1:
            turns.restart(self._clock(), self._num_steps())
            lines: list[Iterable[Group]] = []
            while len(lines) < 2 * self._limits.lookahead and (account := turns.top()) is not None:
                lines.append(islice(accounts[account].values(), _MOST_GROUPS))
                turns.pass_over()
            for group in chain.from_iterable(zip_longest(*lines)):
                if group is not None and group.adapter is not None and not group.adapter.pages:
                    yield group.head
        yield from self._waiting

    def settle(self) -> None:
        """Release requests held for a shared prefill that is done, and forget late adapters that have been read.

        Needed only while a request waits or an adapter is late.
        """
        if self._prefills:
            self._prefills.settle()
        if self.late:
            self.late = {adapter for adapter in self.late if adapter.requests and not _is_read(self._store, adapter)}

    def has_late_turn(self) -> bool:
        """True if a tenant is overdue for its turn."""
        if len(self._waiting.accounts) < 2:
            return False
        self._turns.restart(self._clock(), self._num_steps())
        return self._turns.top() is not None and self._turns.is_late

    def note_late(self, adapter: Adapter) -> None:
        """Record an adapter that missed its deadline; no read estimate is trusted for `DOUBT_SECONDS`."""
        self.late.add(adapter)
        self._doubt_until = self._clock() + DOUBT_SECONDS

    def admit(self, running: Running, budget: int, rows: int) -> dict[Request, int]:
        """Move waiting requests to `running`, in queue order; return how many tokens of `budget` each computes: 0 while
        its KV is copied back from host memory.

        rows: number of running requests in the step. Requests for adapters not yet available are skipped. Admission
        stops at the first request that lacks tokens. Once one lacks pages, only tenants within their share of the pages
        begin more, and none if it is overdue for its turn, so that small requests don't starve a large one. With
        every slot taken, two kinds of request may still begin. A tenant without a row, or that was served less, takes
        over a row of another (`SeatShares`). A call with no running answer takes a row while the step has one; answers
        of calls with n > 1 then take turns.
        """
        return self._admit(running, budget, rows)

    def would_admit(self, running: Running, budget: int) -> bool:
        """True if `admit` would admit a request, or might preempt another for it. All of `running` have rows."""
        return bool(self._admit(running, budget, len(running), only_look=True))

    def _admit(self, running: Running, budget: int, rows: int, *, only_look: bool = False) -> dict[Request, int]:
        """See `admit`. only_look: return the first request that would run, and leave it in the queue."""
        admitted: dict[Request, int] = {}
        if budget <= 0 or (place := self._place(running, rows)) is None:
            return admitted
        step = Step(self._limits, self._store, running, self.late, self._clock(), self._doubt_until, self.only)
        step.held |= self._pages.givers(step.now)
        self._open(step, place)
        while budget > 0 and (found := self._candidate(step, budget, rows + len(admitted))) is not None:
            request, blocks, count = found
            has_room = self._has_room(request, blocks, step)
            if only_look and (
                has_room or self._shares.may_begin(request.account) or self._beyond_shares(request, step)
            ):
                return {request: 0}
            if has_room:
                if (started := self._start(request, blocks, count, step)) is not None:
                    admitted[request] = started
                    budget -= started
            elif not self._find_room(request, step):
                break
        return admitted

    def _candidate(self, step: Step, budget: int, rows: int) -> tuple[Request, list[Block], int] | None:
        """Return the next request that may begin if it gets pages, its cached prefix and its tokens of `budget`; None
        if there is none.
        """
        while (request := step.next()) is not None:
            place = self._place(step.running, rows)
            if place is None or step.has_row_of_call(place, request):
                return None
            if place is not step.place:
                self._open(step, place)
            elif not self._may_join(request, step, budget):
                step.order.pass_over()
            elif self._has_share(request, step):
                blocks = self._memory.match(request)
                kept = self._memory.kept_tokens(request, blocks)
                count = request.num_tokens - kept
                if count > budget and not self._limits.chunked_prefill:
                    return None
                if not self._prefills.wait(request, kept):
                    return request, blocks, min(count, budget)
                step.order.go_on()
        return None

    def _has_share(self, request: Request, step: Step) -> bool:
        """True unless pages are short, and its tenant would go beyond its share of them and is passed over."""
        if not step.num_short or self._pages.allow(request, step.running, self._growth(step)):
            return True
        step.pass_over_tenant(request.account)
        return False

    def _place(self, running: Running, rows: int) -> Place | None:
        """Return the kind of slot that one more request may take; None if there is none. While a mode policy excludes
        requests, up to `max_num_seqs` others may run; the excluded keep their pages.
        """
        seats = self._seats
        if len(running) < seats or (self.only is not None and rows < seats):
            return Place.SEAT
        if self._shares.is_open_to(self._waiting.accounts.keys()):
            return Place.ACCOUNT
        if rows < seats and running.num_calls < seats and self._waiting.has_firsts():
            return Place.CALL
        return None

    def _find_room(self, request: Request, step: Step) -> bool:
        """Free pages for a request that lacks them, or skip or fail it; False ends the step's admission."""
        if self._store.give_up_loads():
            return True
        if self._make_way(request, step):
            return not self._memory.swapped.frees_pages  # if so, the pages are free only after the copy
        if step.running or self._store.loads.under_way:
            step.pass_over_tenant(request.account)
            return request.account in step.running.accounts or not step.order.is_late()
        self._waiting.remove(request)
        step.order.go_on()
        message = "the arena has too few pages left beside pinned adapters; unpin some"
        self._fail(request, message, LoadFailure.NO_ROOM)
        return True

    def _make_way(self, request: Request, step: Step) -> bool:
        """Preempt requests for one that lacks pages; False if none may be preempted."""
        victims = self._find_victims(request, step)
        for victim in victims:
            step.growth = None
            step.held.add(victim.account)
            self._preempt(victim)
        return bool(victims)

    def _find_victims(self, request: Request, step: Step) -> list[Request]:
        """Return the requests to preempt for one that lacks pages.

        First a paused request, for any tenant that may take over a row (`SeatShares.may_begin`); then running ones, for
        a tenant below its share of the pages; then one, for an overdue tenant with no running request.
        """
        account, shares, running = request.account, self._shares, step.running
        paused = shares.sitting_out(account)
        if paused is not None and shares.may_begin(account):
            return [paused]
        victims = self._beyond_shares(request, step)
        if victims:
            self._pages.take(request, victims, step.now)
        elif account not in running.accounts and step.order.is_late() and shares.may_begin(account):
            earlier = shares.earlier()
            victim = self._victims.choose(earlier) if len(earlier) > 1 else running[0]
            victims = [victim] if victim is not running[0] and running.accounts[victim.account] > 1 else []
        for victim in victims:
            shares.free_row(victim)
        return victims

    def _beyond_shares(self, request: Request, step: Step) -> list[Request]:
        """Return the requests to preempt for one that lacks pages within its tenant's share."""
        return self._pages.find_victims(request, step.running, self._growth(step), step.now)

    def _open(self, step: Step, place: Place) -> None:
        """Restart the step's candidates: the requests that may take this kind of slot."""
        self._turns.restart(step.now, self._num_steps())
        step.place, step.order = place, QueueOrder(
            self._waiting, self._turns, self._store, step.overdue_before, step.may_come if step.is_limited else None,
            place is Place.CALL, self._shares.may_begin if place is Place.ACCOUNT else None, step.held,
        )  # fmt: skip

    def _may_join(self, request: Request, step: Step, budget: int) -> bool:
        """True unless a request must wait for its adapter or for a free adapter slot in the step."""
        adapter = request.adapter
        if adapter is not None and step.is_barred(adapter):
            if step.order.is_overdue():
                step.reserve(request)
            return False
        if step.is_reserved(request):
            return False
        return adapter is None or self._loads.may_start(adapter, min(request.num_tokens, budget))

    def _has_room(self, request: Request, blocks: list[Block], step: Step) -> bool:
        """True if there are pages for a request's known tokens and for the expected growth of all running requests.

        blocks: its prefix in the prefix cache.
        """
        if not self._memory.fits(request, blocks):
            return False
        if not step.running:
            return True
        fits, growth = self._memory.fits, self._growth(step)
        return fits(request, blocks, growth.total_with(request)) or fits(request, blocks, growth.peak_with(request))

    def _growth(self, step: Step) -> Growth:
        """Return the pages that the step's running requests are expected to grow by."""
        if step.growth is None:
            step.growth = Growth(self._lengths, self._memory.block_tokens, step.running)
        return step.growth

    def _start(self, request: Request, blocks: list[Block], count: int, step: Step) -> int | None:
        """Start a waiting request with `count` tokens; return how many it computes, 0 while its KV is copied back.

        None if its adapter can't be loaded, which fails this request only.
        """
        self._waiting.remove(request)
        step.order.go_on()
        if request.start_time is None:
            request.start_time = self._clock()
        try:
            self._memory.start(request, blocks, count)
        except Exception as error:
            self._fail(request, *load_error(request, error))
            return None
        request.state = RequestState.LOADING if is_loading(request) else RequestState.RUNNING
        request.began_at = len(blocks) * self._memory.block_tokens
        self._policy.charge(request, self._lengths.final_length(request) - 1)
        self._turns.take(request.account, self._clock(), self._num_steps())
        self._prefills.begin(request)
        step.add(request)
        self._shares.begin(request)
        return 0 if request.coming is not None else count


@dataclass(eq=False, slots=True)
class Step:
    """One step's admission: the running requests, and the adapters that may join them.

    _late: adapters that must be read completely before their requests start; until `_doubt_until` all must.
    _only: adapters that may join; None: all. growth: pages that `running` is expected to grow by; None until counted.
    place, order: the kind of slot that the next request may take, and the candidates for it. held: tenants that may
    begin no more requests: one lacked pages, or pages were taken from them (they would take these back). num_short: how
    often a request lacked pages; from the first on, tenants begin nothing beyond their share of the pages.

    A step has at most `max_adapters_per_step` adapters. An overdue request that waits for a free adapter slot reserves
    it: requests behind it in the queue may neither add an adapter nor take the last slot.
    """

    _limits: EngineConfig
    _store: AdapterStore
    running: Running
    _late: set[Adapter]
    now: float
    _doubt_until: float
    _only: Collection[Adapter | None] | None = None
    growth: Growth | None = None
    num_short: int = 0
    held: set[str] = field(default_factory=set)
    place: Place = field(init=False)
    order: QueueOrder = field(init=False)
    overdue_before: float = field(init=False)
    _doubts: bool = field(init=False)
    _most_adapters: int | None = field(init=False)
    _adapters: set[Adapter] = field(default_factory=set)
    _reserved: float = math.inf  # queue position of the first request with a reserved slot

    def __post_init__(self) -> None:
        self.overdue_before = self.now - self._limits.max_overtake_seconds
        self._doubts = self.now < self._doubt_until
        self._most_adapters = self._limits.max_adapters_per_step
        if self._most_adapters is not None:
            self._adapters = {request.adapter for request in self.running if request.adapter is not None}

    def next(self) -> Request | None:
        """Return the next candidate; None if there is none, or too many have lacked pages."""
        return self.order.next() if self.num_short <= MOST_SHORT else None

    def has_row_of_call(self, place: Place, request: Request) -> bool:
        """True if a request may only take the row of a call without a running answer, and its call has one."""
        return place is self.place is Place.CALL and request.call in self.running.calls

    def pass_over_tenant(self, account: str) -> None:
        """Begin no more requests of a tenant that lacks pages."""
        self.held.add(account)
        self.num_short += 1

    @property
    def is_limited(self) -> bool:
        """True if not every adapter may join."""
        return self._most_adapters is not None or self._doubts or bool(self._late) or self._only is not None

    def may_come(self, adapter: Adapter | None, head: Request | None) -> bool:
        """True if an adapter, or the base model, may join the step.

        head: a tenant's first request that waits for it; an overdue head gets a slot reserved.
        """
        if self._only is not None and adapter not in self._only:
            return False
        if adapter is None:
            return True
        if self.is_barred(adapter):
            if head is not None and head.arrival_time < self.overdue_before and _is_read(self._store, adapter):
                self.reserve(head)
            return False
        if adapter in self._late or (self._doubts and not adapter.pages):
            return _is_read(self._store, adapter)
        return True

    def is_barred(self, adapter: Adapter) -> bool:
        """True if the step has no slot for an adapter."""
        most, adapters = self._most_adapters, self._adapters
        return most is not None and adapter not in adapters and len(adapters) >= most

    def reserve(self, request: Request) -> None:
        """Reserve a slot for an overdue request with a barred adapter."""
        self._reserved = min(self._reserved, request.place)

    def is_reserved(self, request: Request) -> bool:
        """True if a request would take the slot reserved for an earlier one."""
        if self._reserved >= request.place:
            return False
        return request.adapter is not None or len(self.running) >= self._limits.max_num_seqs - 1

    def add(self, request: Request) -> None:
        """Add an admitted request."""
        self.running.append(request)
        if self.growth is not None:
            self.growth.add(request)
        if request.adapter is not None:
            self._adapters.add(request.adapter)


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

    def wait(self, request: Request, num_tokens: int) -> bool:
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

    def holds(self, account: str) -> bool:
        """True if a request of a tenant is held back."""
        followers = chain.from_iterable(self._followers.values())
        return any(request.account == account and request in self._waiting for request in followers)

    def settle(self) -> None:
        """Release a leader's followers once it has computed the prompt, or never will."""
        for key, leader in list(self._leaders.items()):
            if not self._leads(leader):
                del self._leaders[key]
                for request in reversed(self._followers.pop(leader, ())):
                    self._waiting.release(request)

    def __bool__(self) -> bool:
        return bool(self._leaders)

    def _leads(self, leader: Request) -> bool:
        return leader.is_running and leader.caching and leader.num_computed_tokens < self._shareable(leader)

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


def _is_read(store: AdapterStore, adapter: Adapter) -> bool:
    """True if nothing of an adapter is still to be read from disk."""
    return store.tier(adapter) not in (Tier.DISK, Tier.LOADING)


def is_loading(request: Request) -> bool:
    """True while a running request's adapter is being loaded, or its KV is being copied back."""
    return request.coming is not None or (request.adapter is not None and request.adapter.transfer is not None)


def load_error(request: Request, error: BaseException) -> tuple[str, LoadFailure | None]:
    """Return the error of a request with an unloadable adapter, and the cause; None for a fault of our own.

    ExecutorLost is raised again: it affects more than this request.
    """
    if isinstance(error, ExecutorLost):
        raise error
    if isinstance(error, AdapterFormatError):
        return str(error), error.failure
    logger.error("loading %r failed", request.adapter, exc_info=error)
    failure = LoadFailure.UNREADABLE if isinstance(error, OSError) else None
    return f"adapter {request.adapter_name!r} was not loaded: {type(error).__name__}: {error}", failure
