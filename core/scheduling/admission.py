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
from .policies import QueuePolicy, VictimPolicy
from .queue_order import QueueOrder, Turns
from .request_memory import RequestMemory
from .running import Running
from .seat_shares import SeatShares
from .waiting import Group, WaitingQueue

logger = logging.getLogger(__name__)

DOUBT_SECONDS = 10.0
"""Seconds for which no request starts before its adapter has been read, after one did not arrive in time."""

_MOST_GROUPS = 32
"""Adapters of an account that are looked at for one to read, those first that have been asked for longest."""


class Place(Enum):
    """A place that a request may take in a step: a free seat, or a row of those that have more than it."""

    SEAT = auto()
    ACCOUNT = auto()  # of an account with more rows than the request's
    CALL = auto()  # of a call with several answers, for one that has none running


@dataclass(eq=False)
class Admission:
    """Lets waiting requests run while tokens, seats and pages last.

    _num_steps: steps so far. _fail: ends a request that is in no queue, with an error message, and why its adapter was
    not loaded. _preempt: sends a running request back to the queue.
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
        self.late: set[Adapter] = set()  # did not arrive in time: requests start only once it has been read
        self.only: Collection[Adapter | None] | None = None  # whose requests alone may begin; None: everybody's
        self._doubt_until = 0.0

    def arrive(self, account: str) -> None:
        """Note that an account comes to the queue, if it had nothing waiting."""
        accounts = self._waiting.accounts
        if account not in accounts and not self._prefills.holds(account):
            now, step = self._clock(), self._num_steps()
            self._policy.arrive(account, accounts, self._turns.least(now, step))
            self._turns.take(account, now, step)

    def end(self, request: Request) -> None:
        """Note that a request, which has left those that run, is charged for what it has computed."""
        expected = request.charged
        self._policy.settle(request)
        self._shares.end(request, expected)
        self._turns.note(request.account)

    def coming(self) -> Iterator[Request]:
        """Yield the waiting requests in the order in which their adapters are to be read.

        Where several accounts wait, those whose adapter is not resident come first, one of each account after another,
        of the accounts whose turn is next: nobody's adapter waits behind all that another has sent.
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
        """Release requests whose shared prefill is done, and forget late adapters that have been read.

        Nothing to do while nobody waits and no adapter is late.
        """
        if self._prefills:
            self._prefills.settle()
        if self.late:
            self.late = {adapter for adapter in self.late if adapter.requests and not _is_read(self._store, adapter)}

    def has_late_turn(self) -> bool:
        """True if an account has waited too long for its turn."""
        if len(self._waiting.accounts) < 2:
            return False
        self._turns.restart(self._clock(), self._num_steps())
        return self._turns.top() is not None and self._turns.is_late

    def note_late(self, adapter: Adapter) -> None:
        """Note that an adapter did not arrive in time: for a while, no estimate of a read is trusted."""
        self.late.add(adapter)
        self._doubt_until = self._clock() + DOUBT_SECONDS

    def admit(self, running: Running, budget: int, rows: int) -> dict[Request, int]:
        """Move waiting requests to `running`, in queue order; returns how many tokens of `budget` each computes: none
        while its KV comes back from host memory.

        rows: number of running requests in the step. Requests whose adapter is not available yet are skipped. Admission
        stops at the first request that lacks tokens or pages, so that small requests don't starve a large one. With
        every seat taken, an account with fewer rows than another may still begin a request, which takes the other's
        row; and so may a call without a running answer while the step has a row for it: answers of calls with several
        then take turns.
        """
        return self._admit(running, budget, rows)

    def would_admit(self, running: Running, budget: int) -> bool:
        """True if `admit` would let a request run, or might send another back for it. All of `running` have rows."""
        return bool(self._admit(running, budget, len(running), only_look=True))

    def _admit(self, running: Running, budget: int, rows: int, *, only_look: bool = False) -> dict[Request, int]:
        """See `admit`. only_look: name the first request that would run, and leave it in the queue."""
        admitted: dict[Request, int] = {}
        if budget <= 0 or (place := self._place(running, rows)) is None:
            return admitted
        step = Step(self._limits, self._store, running, self.late, self._clock(), self._doubt_until, self.only)
        self._open(step, place)
        while budget > 0 and (found := self._candidate(step, budget, rows + len(admitted))) is not None:
            request, blocks, count = found
            has_room = self._has_room(request, blocks, step)
            if only_look and (has_room or self._shares.may_begin(request.account)):
                return {request: 0}
            if has_room:
                if (started := self._start(request, blocks, count, step)) is not None:
                    admitted[request] = started
                    budget -= started
            elif not self._find_room(request, step):
                break
        return admitted

    def _candidate(self, step: Step, budget: int, rows: int) -> tuple[Request, list[Block], int] | None:
        """Return the next request that may begin if it has pages, its cached prefix and its tokens of `budget`; None
        where there is none.
        """
        while (request := step.order.next()) is not None:
            place = self._place(step.running, rows)
            if place is None or (place is step.place is Place.CALL and request.call in step.running.calls):
                return None
            if place is not step.place:
                self._open(step, place)
            elif not self._may_join(request, step, budget):
                step.order.pass_over()
            else:
                blocks = self._memory.match(request)
                kept = self._memory.kept_tokens(request, blocks)
                count = request.num_tokens - kept
                if count > budget and not self._limits.chunked_prefill:
                    return None
                if not self._prefills.wait(request, kept):
                    return request, blocks, min(count, budget)
                step.order.go_on()
        return None

    def _place(self, running: Running, rows: int) -> Place | None:
        """Return the place that one more request may take: with a seat free any, else that of a request without a row
        of its own. None where there is none. While a mode policy leaves requests out, these keep their pages and others
        may take the step's rows.
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
        """See to pages for a request that lacks them, or pass it over; False if no request may begin before it."""
        if self._store.give_up_loads():
            return True
        if self._make_way(request, step):
            return not self._memory.swapped.frees_pages  # the pages are there once they have been copied
        if step.running or self._store.loads.under_way:
            step.held.update(step.running.accounts)
            return request.account in step.held and not step.held >= self._waiting.accounts.keys()
        self._waiting.remove(request)
        step.order.go_on()
        message = "the arena has too few pages left beside pinned adapters; unpin some"
        self._fail(request, message, LoadFailure.NO_ROOM)
        return True

    def _make_way(self, request: Request, step: Step) -> bool:
        """Preempt a request for one that lacks pages; False if none is to yield.

        Whoever sits out yields to an account that has fewer rows; who has a row does to one that is late for its turn
        and has nothing running.
        """
        account, late = request.account, step.order.is_late()
        if not self._shares.may_begin(account):
            return False
        victim, running = self._shares.sitting_out(account), step.running
        if victim is None:
            earlier = self._shares.earlier() if late and account not in running.accounts else ()
            victim = self._victims.choose(earlier) if len(earlier) > 1 else None
            if victim is None or victim is running[0] or running.accounts[victim.account] < 2:
                return False
            self._shares.free_row(victim)
        step.growth = None
        step.held.add(victim.account)
        self._preempt(victim)
        return True

    def _open(self, step: Step, place: Place) -> None:
        """Have the step's candidates be the requests that may take a place of a kind, from the first one on."""
        self._turns.restart(step.now, self._num_steps())
        step.place, step.order = place, QueueOrder(
            self._waiting, self._turns, self._store, step.overdue_before, step.may_come if step.is_limited else None,
            place is Place.CALL, self._shares.may_begin if place is Place.ACCOUNT else None, step.held,
        )  # fmt: skip

    def _may_join(self, request: Request, step: Step, budget: int) -> bool:
        """True unless a request must wait for its adapter or for a free adapter place in the step."""
        adapter = request.adapter
        if adapter is not None and step.is_barred(adapter):
            if step.order.is_overdue():
                step.reserve(request)
            return False
        if step.is_reserved(request):
            return False
        return adapter is None or self._loads.may_start(adapter, min(request.num_tokens, budget))

    def _has_room(self, request: Request, blocks: list[Block], step: Step) -> bool:
        """True if there are pages for a request's known tokens and for the expected growth of all that run.

        blocks: its prefix in the prefix cache.
        """
        if not self._memory.fits(request, blocks):
            return False
        if not step.running:
            return True
        if step.growth is None:
            step.growth = Growth(self._lengths, self._memory.block_tokens, step.running)
        fits, growth = self._memory.fits, step.growth
        return fits(request, blocks, growth.total_with(request)) or fits(request, blocks, growth.peak_with(request))

    def _start(self, request: Request, blocks: list[Block], count: int, step: Step) -> int | None:
        """Start a waiting request with `count` tokens; returns how many it computes, 0 while its KV comes back.

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
        is_loading = request.adapter is not None and request.adapter.transfer is not None
        request.state = RequestState.LOADING if is_loading or request.coming is not None else RequestState.RUNNING
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

    _late: adapters whose requests start only once they have been read; until `_doubt_until` that holds for all.
    _only: adapters whose requests may join; None: all. growth: pages that `running` is expected to grow by; None until
    they are counted. place, order: what the next request may take, and the candidates for it. held: accounts that may
    begin nothing more, because others of theirs run or made way.

    A step has at most `max_adapters_per_step` adapters. An overdue request that waits for a free adapter place reserves
    it: requests behind it in the queue may neither add an adapter nor take the last seat.
    """

    _limits: EngineConfig
    _store: AdapterStore
    running: Running
    _late: set[Adapter]
    now: float
    _doubt_until: float
    _only: Collection[Adapter | None] | None = None
    growth: Growth | None = None
    held: set[str] = field(default_factory=set)
    place: Place = field(init=False)
    order: QueueOrder = field(init=False)
    overdue_before: float = field(init=False)
    _doubts: bool = field(init=False)
    _most_adapters: int | None = field(init=False)
    _adapters: set[Adapter] = field(default_factory=set)
    _reserved: float = math.inf  # queue position of the first request that has a place reserved

    def __post_init__(self) -> None:
        self.overdue_before = self.now - self._limits.max_overtake_seconds
        self._doubts = self.now < self._doubt_until
        self._most_adapters = self._limits.max_adapters_per_step
        if self._most_adapters is not None:
            self._adapters = {request.adapter for request in self.running if request.adapter is not None}

    @property
    def is_limited(self) -> bool:
        """True if not every adapter may join."""
        return self._most_adapters is not None or self._doubts or bool(self._late) or self._only is not None

    def may_come(self, adapter: Adapter | None, head: Request | None) -> bool:
        """True if an adapter, or the base model, may join the step.

        head: the first request of an account that waits for it, which has a place reserved if it is overdue.
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
        """True if the step has no place for an adapter."""
        most, adapters = self._most_adapters, self._adapters
        return most is not None and adapter not in adapters and len(adapters) >= most

    def reserve(self, request: Request) -> None:
        """Reserve a place for an overdue request whose adapter is barred."""
        self._reserved = min(self._reserved, request.place)

    def is_reserved(self, request: Request) -> bool:
        """True if a request would take the place reserved for one before it."""
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
        """True if a request of an account is held back."""
        followers = chain.from_iterable(self._followers.values())
        return any(request.account == account and request in self._waiting for request in followers)

    def settle(self) -> None:
        """Release the requests whose leader has computed the prompt, or never will."""
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


def load_error(request: Request, error: BaseException) -> tuple[str, LoadFailure | None]:
    """Return the error of a request whose adapter was not loaded, and why it was not; None for a fault of our own.

    ExecutorLost is raised again: it is not this request's alone.
    """
    if isinstance(error, ExecutorLost):
        raise error
    if isinstance(error, AdapterFormatError):
        return str(error), error.failure
    logger.error("loading %r failed", request.adapter, exc_info=error)
    failure = LoadFailure.UNREADABLE if isinstance(error, OSError) else None
    return f"adapter {request.adapter_name!r} was not loaded: {type(error).__name__}: {error}", failure
