"""A step being planned: it takes candidates in order until its rows, tokens, pages or adapters are used up."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ..config import EngineConfig
from ..requests.request import Request
from .adapter_turns import AdapterTurns
from .lifecycle import Lifecycle
from .output_lengths import Growth
from .queues import AdapterQueue, Running, WaitingQueue, num_missing
from .service import Service, SomeTurns, Turns
from .shares import max_min_level

OVERDUE, RESIDENT, COMING = range(3)

MANY = 64
"""With at least this many waiting tenants, first look for the tenants with an eligible request. Chosen."""

SHARE = 4
"""If at least one waiting tenant in so many has one, all are tried in turn instead: a hit comes soon. Chosen."""

Entry = tuple[int, int, int, AdapterQueue]
"""Class of a group's head, its queue position, class of the group's adapter, the group."""


class QueueOrder:
    """Candidates for admission in one step.

    Tenants come in order of their turns. Within a tenant, requests for resident adapters and for the base model come
    first, then requests for adapters being read, each in queue order. A request can't run, and is left out, while no
    part of its adapter has been read, or while the read is slow and unfinished. A request that arrived before
    `overdue_before` has been overtaken for long enough: it goes first in its tenant, whatever its adapter.

    Where many tenants wait and few of them have an eligible request, only these few are tried.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        turns: Turns,
        store: AdapterStore,
        overdue_before: float,
        may_run: Callable[[Adapter | None, Request | None], bool] | None = None,
        only_firsts: bool = False,
        may_begin: Callable[[str], bool] | None = None,
    ) -> None:
        """turns: restarted. may_run: filters adapters; called with an adapter (None: the base model) and the first
        request of a tenant that waits for it (None: of any tenant). None: every adapter is eligible. only_firsts:
        consider only the first answer of each call. may_begin: filters tenants, each time that one comes; None:
        every tenant is eligible.
        """
        self._waiting = waiting
        self.turns: Turns | SomeTurns = turns
        self._store = store
        self._overdue_before = overdue_before
        self._may_run = may_run
        self._only_firsts = only_firsts
        self._may_begin = may_begin
        resident, coming = store.near(waiting.by_adapter.keys())
        self._near: dict[Adapter | None, int] = {**dict.fromkeys(resident, RESIDENT), **dict.fromkeys(coming, COMING)}
        if None in waiting.by_adapter:
            self._near[None] = RESIDENT
        if may_run is not None and not any(may_run(adapter, None) for adapter in self._near):
            self._near = {}  # no request can begin, and none needs an adapter slot reserved
        self._entries: dict[str, list[Entry]] = {}  # of tenants that have come to the top
        self._top: list[Entry] = []  # of the last candidate's tenant
        if len(waiting.tenants) >= MANY and (few := self._few()) is not None:
            self.turns = SomeTurns(turns, waiting, few)

    def next(self) -> Request | None:
        """Return the next candidate; the same request until it has left its group, or its group is skipped."""
        while (tenant := self.turns.top()) is not None:
            if self._may_begin is None or self._may_begin(tenant):
                entries = self._entries.get(tenant)
                if entries is None:
                    entries = self._entries[tenant] = self._open(self._waiting.tenants.get(tenant, {}))
                if entries:
                    self._top = entries
                    return next(iter(self._line(entries[0][3])))
            self.turns.pass_over()
        return None

    def go_on(self) -> None:
        """Go on to the next candidate, after the last one has left its group."""
        entries = self._top
        _, _, kind, group = entries[0]
        if line := self._line(group):
            heapq.heapreplace(entries, self._entry(kind, next(iter(line)), group))
        else:
            self.pass_over()

    def pass_over(self) -> None:
        """Drop the last candidate's group from this step."""
        heapq.heappop(self._top)

    def _open(self, groups: dict[Adapter | None, AdapterQueue]) -> list[Entry]:
        """Return a tenant's eligible groups, as a heap."""
        entries: list[Entry] = []
        for adapter in self._near.keys() & groups.keys():
            group = groups[adapter]
            head = next(iter(self._line(group)), None)
            if head is not None and (self._may_run is None or self._may_run(adapter, head)):
                entries.append(self._entry(self._near[adapter], head, group))
        heapq.heapify(entries)
        return entries

    def _few(self) -> set[str] | None:
        """Return the tenants with a request for a near adapter; None if these are many."""
        found: list[str] = []
        for adapter in self._near:
            found += self._waiting.by_adapter[adapter]
            if SHARE * len(found) >= len(self._waiting.tenants):
                return None
        return set(found)

    def _line(self, group: AdapterQueue) -> Mapping[Request, None]:
        return group.first_choices if self._only_firsts else group

    def _entry(self, kind: int, head: Request, group: AdapterQueue) -> Entry:
        """Return a heap entry; queue positions differ, so that groups are never compared."""
        return OVERDUE if head.arrival_time < self._overdue_before else kind, head.queue_position, kind, group


class SlotSource(Enum):
    """The slot that a request may take in a step: a free one, or the row of another tenant or call."""

    FREE = auto()
    TENANT = auto()  # from a tenant that was served more
    CHOICE = auto()  # from a call with several answers, for a call with no running answer
    ADAPTER = auto()  # from an adapter that gives its index to an overdue one


@dataclass(eq=False, slots=True)
class StepBuilder:
    """A step being planned, first of running requests, then of waiting ones.

    running: all running requests; admitted ones are added. taking: candidates for a row. only: eligible adapters
    (None: the base model); None: all. all_decode: all of `taking` decode one token each; else `counts` has the tokens
    of each. cut: prompts cut short by their tenant's share of the tokens. was_short: a running request lacked pages.
    is_async: of a step behind one that is under way: nothing is preempted, and `was_short` is True where it would be.

    Of admission: `begun` requests, whose tokens are among `counts`. num_rows, budget: rows taken, tokens left. place,
    order: the kind of slot that the next request may take, and the candidates for it. growth: pages that `running` is
    expected to grow by; None until counted. held: tenants that may begin no more requests: one lacked pages, or one was
    preempted (it would take them back). givers: tenants that gave pages in an earlier step, which the taker waits for;
    they begin nothing unless owed a turn. num_short: how often a request lacked pages; from the first on, tenants begin
    nothing beyond their share of the pages.

    With every slot taken, a tenant may still begin a request if it has no row, or if its served cost is below that of
    the giver: the tenant with the highest served cost among tenants with two or more rows. The giver's newest decoding
    request is paused. A tenant with a paused request begins no new one.

    A step has at most `max_adapters_per_step` adapters. With all of these taken, a request of another adapter begins
    once it is overdue (`AdapterTurns`): then the sequences of the adapter that gives its index are descheduled. The
    index of a request that is preempted for a waiting one is free from the next step on.
    """

    _limits: EngineConfig
    _service: Service
    _lifecycle: Lifecycle
    _turns: AdapterTurns
    running: Running
    candidates: Sequence[Request]
    now: float
    eligible_adapters: Collection[Adapter | None] | None = None
    all_decode: bool = False
    is_async: bool = False
    counts: dict[Request, int] = field(default_factory=dict)
    truncated: list[Request] = field(default_factory=list)
    was_short: bool = False
    admitted: set[Request] = field(default_factory=set)
    num_sequences: int = 0
    budget: int = 0
    slot_source: SlotSource = field(init=False)
    order: QueueOrder = field(init=False)
    growth: Growth | None = None
    num_short: int = 0
    barred: set[str] = field(default_factory=set)
    donors: Set[str] = frozenset()
    overdue_before: float = 0.0
    descheduled: set[Adapter] = field(default_factory=set)  # gave their index to a request that has begun
    may_displace: bool = True  # False once no waiting request is left that could take an index
    _borrowed: int = 0  # a token more than the step has, of the row that is given up for one that begins
    _adapters: set[Adapter] = field(default_factory=set)
    _index_donors: list[Adapter] | None = None  # adapters that may give their index, the last first; None: unknown
    _counts_by_tenant: dict[str, int] = field(default_factory=dict)  # number of rows by tenant, with admitted requests
    _admitted_by_tenant: dict[str, int] = field(default_factory=dict)  # of these, rows of admitted requests
    _served: dict[str, float] = field(default_factory=dict)  # cost of tenants, as of this step
    _donor: tuple[str | None] | None = None  # None: unknown

    # -- running requests

    def schedule_running(self, requests: Sequence[Request], waiting: Collection[str]) -> None:
        """Take running requests until the tokens are used up. waiting: tenants.

        Decoding requests come first, so that a long prompt's chunks never delay them; then in order of admission.
        """
        prompts, decoding = _split(requests)
        self.budget = self._limits.max_num_batched_tokens
        if len(decoding) <= self.budget and self._lifecycle.memory.grow_by_one(decoding):
            self.counts, decoding = dict.fromkeys(decoding, 1), []
            self.budget -= len(self.counts)
        shares = self._prompt_shares(prompts, len(requests) - len(prompts), waiting)
        for request in (*decoding, *prompts):
            if self.budget <= 0:
                break
            if not request.is_running:  # preempted for an earlier request
                continue
            count = wanted = min(self.budget, num_missing(request))
            if shares is not None and num_missing(request) > 1:
                count = min(wanted, shares[request.fairness_key])
                shares[request.fairness_key] -= count
            if count < wanted:
                self.truncated.append(request)
            if count:
                self._take(request, count)

    def _take(self, request: Request, count: int) -> None:
        """Take `count` tokens of a running request if it gets pages; others, or itself, are preempted for them. Pages
        that have to be copied out first become free only later.
        """
        end, memory, lifecycle = request.num_computed_tokens + count, self._lifecycle.memory, self._lifecycle
        while request.room < end and not memory.grow(request, end):
            if lifecycle.store.give_up_loads():
                continue
            self.was_short = True
            if self.is_async or memory.swapped.frees_pages:
                return
            victim = self._service.last(self.running)
            lifecycle.preempt(victim)
            self.budget += self.counts.pop(victim, 0)
            if victim is request:
                return
        self.counts[request] = count
        self.budget -= count

    def _prompt_shares(
        self, prompts: Sequence[Request], num_decoding: int, waiting: Collection[str]
    ) -> dict[str, int] | None:
        """Split the step's tokens by weight among the tenants with prompts under way and the first waiting tenant
        without a request there; None where one tenant has them all.
        """
        wanted: Counter[str] = Counter()
        for request in prompts:
            wanted[request.fairness_key] += num_missing(request)
        here = wanted if len(self.running) < self._limits.max_num_seqs else self.running.tenants
        newcomer = next((tenant for tenant in waiting if tenant not in here), None)
        if len(wanted) + (newcomer is not None) < 2 or not self._limits.chunked_prefill:
            return None
        weights, budget = self._limits.weights, max(0, self._limits.max_num_batched_tokens - num_decoding)
        level = max_min_level(budget, wanted, weights, 0.0 if newcomer is None else weights.get(newcomer, 1.0))
        return {each: math.ceil(min(want, level * weights.get(each, 1.0))) for each, want in wanted.items()}

    def add_to_chunks(self) -> None:
        """Give prompts that were cut short the tokens left over, as far as there are rows and pages."""
        counts, limits = self.counts, self._limits
        budget = limits.max_num_batched_tokens - sum(counts.values())
        for request in self.truncated:
            count = counts.get(request, 0)
            if not request.is_running or request.adapter in self.descheduled:
                continue
            if not count and len(counts) >= limits.max_num_seqs:
                continue
            more = min(budget, num_missing(request) - count)
            end = request.num_computed_tokens + count + more
            if more > 0 and (request.room >= end or self._lifecycle.memory.grow(request, end)):
                counts[request] = count + more
                budget -= more

    def drop_descheduled(self) -> None:
        """Take the rows of running requests that don't keep theirs beside the admitted ones."""
        counts, gone = self.counts, self.descheduled
        here = [each for each in self.running if each.restoring is None and each.adapter not in gone]
        taking = [each for each in here if self.all_decode or each in counts]
        self.counts = {each: counts.get(each, 1) for each in self._service.choose(taking, self.admitted)}
        self.all_decode = False

    # -- waiting requests

    def begin_admission(self) -> None:
        """Count what running requests have taken, before waiting ones are admitted.

        Where they have every row, a token at least is left, so that a request that takes over a row can decode.
        """
        limits, running = self._limits, self.running
        self.overdue_before = self.now - limits.max_overtake_seconds
        self.num_sequences = len(self.candidates) if self.all_decode else len(self.counts)
        used = self.num_sequences if self.all_decode else sum(self.counts.values())
        left = limits.max_num_batched_tokens - used
        self._borrowed = int(left <= 0 and self.num_sequences == limits.max_num_seqs)
        self.budget = left + self._borrowed
        if self._turns.most is not None:
            self._adapters = {request.adapter for request in self.candidates if request.adapter is not None}
        all_running = len(self.candidates) == len(running)
        self._counts_by_tenant = dict(
            running.tenants if all_running else Counter([request.fairness_key for request in self.candidates])
        )

    def begin(self, request: Request, count: int, length: int) -> None:
        """Add an admitted request with `count` tokens (0: it has no row yet), and charge its tenant for it.

        length: tokens that it is expected to end with.
        """
        tenant = request.fairness_key
        self.running.append(request)
        self.admitted.add(request)
        self._service.begin(request, length - 1)
        if self.growth is not None:
            self.growth.add(request)
        if request.adapter is not None:
            if self.lacks_index(request.adapter):
                self._displace()
            self._adapters.add(request.adapter)
        self.num_sequences += 1
        if count:
            self.counts[request] = count
            self.budget -= count
            self._admitted_by_tenant[tenant] = self._admitted_by_tenant.get(tenant, 0) + 1
        self._change(tenant, bool(count))
        if (
            count
            and sum(self._counts_by_tenant.values()) > self._limits.max_num_seqs
            and (giver := self._find_donor()) is not None
        ):
            self._change(giver, -1)

    # -- adapters

    def lacks_index(self, adapter: Adapter) -> bool:
        """True if every index of the step is another adapter's."""
        most, adapters = self._turns.most, self._adapters
        return most is not None and adapter not in adapters and len(adapters) >= most

    def may_take_index(self, adapter: Adapter, head: Request) -> bool:
        """True if the first request of a barred adapter is overdue, and another adapter may give its index to it.

        Of an adapter with running sequences, these have their turn first.
        """
        if adapter in self.running.by_adapter() or not self._turns.is_overdue(adapter, head.arrival_time, self.now):
            return False
        return self.has_index_to_give

    def is_open_to_adapters(self, waiting: Iterable[Request]) -> bool:
        """True if a waiting request may be overdue for an index, and an adapter has one to give."""
        if self._turns.most is None or not self.may_displace or len(self._adapters) < self._turns.most:
            return False
        oldest = next(iter(waiting), None)
        is_overdue = oldest is not None and oldest.arrival_time < self.overdue_before
        return is_overdue and self.has_index_to_give

    @property
    def has_index_to_give(self) -> bool:
        """True if an adapter may give its index to a waiting request."""
        return bool(self._donors_of_index())

    @property
    def num_without_index(self) -> int:
        """Running sequences that are descheduled because their adapters have no index: they take no slot."""
        most, adapters = self._turns.most, self._adapters
        if most is None or len(adapters) < most:
            return 0
        left_out = [
            group for adapter, group in self.running.by_adapter().items() if adapter and adapter not in adapters
        ]
        return sum(may_compute(request, self.eligible_adapters) for group in left_out for request in group)

    def _donors_of_index(self) -> list[Adapter]:
        if self._index_donors is None:
            self._index_donors = self._turns.donors(self.candidates, self._service.order, self.now)
        return self._index_donors

    def _displace(self) -> None:
        """Deschedule the sequences of the adapter that gives its index: their rows and tokens are free again."""
        self._turns.note_taken()
        giver = self._donors_of_index().pop(0)
        self._adapters.remove(giver)
        self.descheduled.add(giver)
        num_rows = self.num_sequences
        taking = set(self.candidates)
        for request in [each for each in self.running if each.adapter is giver]:
            is_new = request in self.admitted  # in this very step, before a request that takes the index
            count = self.counts.pop(request, int(self.all_decode and not is_new))
            self.budget += count
            self.num_sequences -= bool(count)
            if is_new and count:
                self._admitted_by_tenant[request.fairness_key] -= 1
            if count or (not is_new and request in taking):
                self._change(request.fairness_key, -1)
        if self.num_sequences < num_rows:  # no other row is given up for the one that begins
            self.budget -= self._borrowed
            self._borrowed = 0

    # -- rows and pages of others

    def is_open_to(self, waiting: Set[str]) -> bool:
        """True if one of the waiting tenants may begin a request although every slot is taken."""
        running = self.running.tenants
        if self._find_donor() is None:
            return False
        if len(running) < self._limits.max_num_seqs and not waiting <= running.keys():
            return True
        return len(running) > 1 and any(map(self.may_begin, running.keys() & waiting))

    def is_candidate(self, tenant: str) -> bool:
        """True if a tenant, the first in turn, may begin a request in a slot of the present kind."""
        if tenant in self.barred or (tenant in self.donors and not self.is_overdue(tenant)):
            return False
        return self.slot_source is not SlotSource.TENANT or self.may_begin(tenant)

    def is_overdue(self, tenant: str) -> bool:
        """True if a tenant, the first in turn, is overdue for it and has no running request."""
        return self.order.turns.is_overdue and tenant not in self.running.tenants

    def may_begin(self, tenant: str) -> bool:
        """True if a tenant may begin a request although every slot is taken: another can give it a row."""
        own, tenants = self._counts_by_tenant.get(tenant, 0), self.running.tenants
        giver = self._find_donor()
        if giver is None or own < tenants.get(tenant, 0):  # some of its own are paused
            return False
        if not own:
            return len(tenants) < self._limits.max_num_seqs  # each tenant keeps a row
        return self._served_of(tenant) < self._served_of(giver)

    def pass_over_tenant(self, tenant: str) -> None:
        """Begin no more requests of a tenant that lacks pages."""
        self.barred.add(tenant)
        self.num_short += 1

    def last_descheduled(self, tenant: str) -> Request | None:
        """Return the newest paused request of another tenant; None if there is none.

        Requests with KV being copied back, and requests that `only` excludes, keep their pages and are not returned.
        """
        if len(self.candidates) >= len(self.running):
            return None
        taking, only = self.admitted.union(self.candidates), self.eligible_adapters
        for request in reversed(self.running):
            if may_compute(request, only) and request not in taking and request.fairness_key != tenant:
                return request
        return None

    def earlier(self) -> list[Request]:
        """Return the running requests that had a row of the step before requests were admitted to it."""
        had = set(self.candidates) - self.admitted
        return [request for request in self.running if request in had]

    def from_end(self, tenants: Collection[str]) -> list[Request]:
        """Return the `earlier` requests of some tenants, the last in the order first."""
        return self._service.order([each for each in self.earlier() if each.fairness_key in tenants])[::-1]

    def last(self) -> Request | None:
        """Return the `earlier` request to preempt for another tenant; None if its tenant would keep none."""
        earlier = self.earlier()
        victim = self._service.last(earlier) if len(earlier) > 1 else None
        if victim is self.running[0] or victim is None or self.running.tenants[victim.fairness_key] < 2:
            return None
        return victim

    def lose(self, request: Request) -> None:
        """Record that a running request was preempted for a waiting one; its tenant begins no more requests."""
        self.growth = None
        self.barred.add(request.fairness_key)
        self._change(request.fairness_key, -(self.candidates is self.running or request in self.candidates))

    def _change(self, tenant: str, rows: int) -> None:
        """Change a tenant's rows; its served cost may have changed, too."""
        self._counts_by_tenant[tenant] = self._counts_by_tenant.get(tenant, 0) + rows
        self._served.pop(tenant, None)
        self._donor = None

    def _served_of(self, tenant: str) -> float:
        cost = self._served.get(tenant)
        if cost is None:
            cost = self._served[tenant] = self._service.served_cost(tenant)
        return cost

    def _find_donor(self) -> str | None:
        """Return the tenant that gives a row to the next admitted request; None if no tenant has one to give."""
        if self._donor is None:
            rows, new = self._counts_by_tenant, self._admitted_by_tenant
            givers = [tenant for tenant, own in rows.items() if own > 1 and own > new.get(tenant, 0)]
            self._donor = (max(givers, key=lambda each: (self._served_of(each), rows[each]), default=None),)
        return self._donor[0]


def may_compute(request: Request, only: Collection[Adapter | None] | None) -> bool:
    """True unless a running request's KV is still being copied back, or its adapter is none of `only` (None: all)."""
    return request.restoring is None and (only is None or request.adapter in only)


def _split(sharing: Sequence[Request]) -> tuple[list[Request], Sequence[Request]]:
    """Return the requests with a prompt to compute, and the requests that decode."""
    prompts = [each for each in sharing if len(each.token_ids) - each.num_computed_tokens > 1]
    return prompts, [each for each in sharing if num_missing(each) == 1] if prompts else sharing
