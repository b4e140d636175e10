"""Who gives a slot, an adapter index or pages to whom, once none is free.

Tests: tests/core/scheduling/test_allocator.py, tests/core/scheduling/test_service.py,
tests/core/scheduling/test_scheduling.py, tests/simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import islice

from ...memory.adapters.adapter import Adapter
from ...memory.pages.eviction import RestoreCosts
from ..config import EngineConfig
from ..requests.request import Request
from .queues import Running, WaitingQueue
from .request_memory import RequestMemory
from .service import Growth, Service, max_min_level

LONGEST_ROUND = 1.0
"""Seconds at most in which all adapters that are overdue at once have a turn of equal length. Chosen."""

RESTORE_SHARE = 0.04
"""Part of the time that may go into restoring requests preempted for a tenant's share, over `RESTORE_WINDOW_SECONDS`.
Chosen: below the twentieth of an engine's throughput that shares may cost.
"""
RESTORE_WINDOW_SECONDS = 10.0

_MOST_WAITING = 64
"""Number of first waiting requests searched for one that waits for an index. Chosen."""

_MOST_REMEMBERED = 4096
"""Adapters whose last step is remembered. Beyond that, those that could be overdue are forgotten. Chosen."""


class Allocator:
    """Chooses who gives, and who gets, what a step has too little of. Donors come from the end of `Service.order`.

    A **slot** is one of the `max_num_seqs` sequences of a step. The donor is the tenant with the highest served cost
    among the tenants with two or more sequences; its newest decoding sequence is descheduled. A recipient has no
    sequence, or a lower served cost than the donor. A tenant with a descheduled request gets no slot: that request
    comes first.

    An **index** belongs to one of the `max_adapters_per_step` adapters of a step. Sequences of other adapters are
    descheduled: they keep their KV. An adapter that has had no step for `max_overtake_seconds` takes the index of
    another, even for a request that has yet to begin. The donor is the adapter whose sequences come last. Each adapter
    keeps its index for an equal part of a round, and for at least one step. A round takes at most `LONGEST_ROUND`.
    Hence an adapter waits for at most `max_overtake_seconds` and a round. A free index goes to the adapter that has
    waited longest.

    **Pages** for KV are split by weight among the tenants with requests in progress (`max_min_level`). A tenant with
    waiting requests wants all it may have, another the pages that its running ones are expected to end with. A request
    that lacks pages, and with which its tenant stays within its share, takes them from the last requests. Each tenant
    keeps a request, and its share; the oldest request of all is no victim.

    `begin` starts the admission of a step, and `end` ends it.
    """

    def __init__(
        self,
        limits: EngineConfig,
        service: Service,
        running: Running,
        waiting: WaitingQueue,
        memory: RequestMemory,
        costs: RestoreCosts,
    ) -> None:
        """running, waiting: the queues; the scheduler changes them."""
        self._max_num_seqs = limits.max_num_seqs
        self.max_adapters = limits.max_adapters_per_step
        """None: no limit."""
        self._patience = limits.max_overtake_seconds
        self._weights = limits.weights
        self._service = service
        self._running = running
        self._waiting = waiting
        self._memory = memory
        self._costs = costs
        self._ran: dict[Adapter, float] = {}  # when each one's last step ended, the latest last
        self._last: dict[Adapter, float] = {}  # adapters of the last step, and since when each has been in every step
        self._denied: Adapter | None = None  # had no turn because an index was left to a waiting request
        self.recipient: Request | None = None
        """The last request that others were preempted for, until it begins."""
        self._gave_pages: set[str] = set()  # tenants of the preempted requests
        self._preempted_at = self._next_preemption = -math.inf

    def begin(
        self,
        candidates: Sequence[Request],
        admitted: Set[Request],
        now: float,
        eligible: Collection[Adapter | None] | None = None,
    ) -> None:
        """Begin a step's admission. candidates: the running requests with a sequence in the step so far.

        admitted: waiting requests that have begun; the caller changes it. eligible: adapters that may run; None: all.
        """
        self._candidates, self._admitted = candidates, admitted
        self._now = now
        self._eligible = eligible
        tenants = (
            self._running.tenants
            if len(candidates) == len(self._running)
            else Counter([request.fairness_key for request in candidates])
        )
        self._counts = dict(tenants)  # sequences of the step by tenant
        self._num_new: dict[str, int] = {}  # of `_counts`: of requests that were just admitted
        self._num_given: dict[str, int] = {}  # sequences that gave their slots to admitted requests
        self._served: dict[str, float] = {}  # served costs, as of this step
        self._slot_donor: tuple[str | None] | None = None  # None: unknown
        self._adapters: set[Adapter] = set()
        if self.max_adapters is not None:
            self._adapters = {request.adapter for request in candidates if request.adapter is not None}
        self._index_donors: list[Adapter] | None = None  # the last in the order first; None: unknown
        self._gives_indices = True
        self._growth: Growth | None = None  # None: unknown
        self._level: float | None = None  # share of the pages of a tenant of weight 1; None: unknown
        self.num_short = 0
        """How often a waiting request lacked pages. From the first time on, no tenant begins requests beyond its share
        of the pages."""
        self._barred: set[str] = set()
        waits = self.recipient in self._waiting and now < self._preempted_at + self._patience
        self.page_donors: Set[str] = self._gave_pages if waits else frozenset()
        """Tenants that gave pages in an earlier step, while the recipient still waits for these."""

    def end(self) -> None:
        """End a step's admission: nothing of it keeps a request that ends."""
        self._candidates, self._admitted, self._growth = (), frozenset(), None

    def may_begin(self, tenant: str, *, is_overdue: bool) -> bool:
        """True unless a tenant's requests must wait for pages. is_overdue: for a turn, without a running request.

        One whose request lacks pages, or was preempted and would take them back, begins no more in this step. Nor does
        one that gave pages in an earlier step while the recipient still waits for them, unless it is overdue.
        """
        if tenant in self._barred:
            return False
        return is_overdue or tenant not in self.page_donors

    # -- slots

    def may_take_slot(self, tenant: str) -> bool:
        """True if a tenant may begin a request although every slot is taken: another one can give it a slot."""
        own, donor = self._counts.get(tenant, 0), self._find_slot_donor()
        if donor is None or own < self._running.tenants.get(tenant, 0):  # some of its own are descheduled
            return False
        if not own:
            return len(self._running.tenants) < self._max_num_seqs  # each tenant keeps a slot
        return self._served_cost(tenant) < self._served_cost(donor)

    def any_may_take_slot(self, tenants: Set[str]) -> bool:
        """True if one of the tenants may begin a request although every slot is taken."""
        running = self._running.tenants
        if self._find_slot_donor() is None:
            return False
        if len(running) < self._max_num_seqs and not tenants <= running.keys():
            return True
        return len(running) > 1 and any(map(self.may_take_slot, running.keys() & tenants))

    def take_slot(self, tenant: str) -> None:
        """Count a sequence of a request that has begun; beyond the slots, the donor gives it one."""
        self._num_new[tenant] = self._num_new.get(tenant, 0) + 1
        self._change(tenant, 1)
        if sum(self._counts.values()) > self._max_num_seqs and (donor := self._find_slot_donor()) is not None:
            self._num_given[donor] = self._num_given.get(donor, 0) + 1
            self._change(donor, -1)

    def drop_slot(self, tenant: str, *, is_new: bool = False) -> None:
        """Count a sequence that is not in the step after all: first one that gave its slot already. is_new: of a
        request that has just begun.
        """
        self._num_new[tenant] = self._num_new.get(tenant, 0) - is_new
        given = self._num_given.get(tenant, 0)
        self._num_given[tenant] = max(0, given - 1)
        self._change(tenant, 0 if given else -1)

    def note_cost(self, tenant: str) -> None:
        """Note that a tenant's served cost has changed."""
        self._change(tenant, 0)

    def _change(self, tenant: str, by: int) -> None:
        self._counts[tenant] = self._counts.get(tenant, 0) + by
        self._served.pop(tenant, None)
        self._slot_donor = None

    def _served_cost(self, tenant: str) -> float:
        cost = self._served.get(tenant)
        if cost is None:
            cost = self._served[tenant] = self._service.served_cost(tenant)
        return cost

    def _find_slot_donor(self) -> str | None:
        """Return the tenant that gives a slot to the next admitted request; None if no tenant has one to give."""
        if self._slot_donor is None:
            counts, new = self._counts, self._num_new
            donors = [tenant for tenant, own in counts.items() if own > 1 and own > new.get(tenant, 0)]
            self._slot_donor = (max(donors, key=lambda each: (self._served_cost(each), counts[each]), default=None),)
        return self._slot_donor[0]

    # -- indices

    def note_step(self, adapters: Collection[Adapter], now: float) -> None:
        """Record the adapters of a step that has ended. Needed only if there is a limit."""
        if self._denied in adapters:
            self._denied = None
        self._last = {adapter: self._last.get(adapter, now) for adapter in adapters}
        for adapter in adapters:
            self._ran.pop(adapter, None)
            self._ran[adapter] = now
        if len(self._ran) > _MOST_REMEMBERED:
            self._ran = {each: then for each, then in self._ran.items() if then > now - self._patience}

    def with_index(self, requests: list[Request], now: float) -> list[Request]:
        """Return the running requests of the adapters that are in the next step, and of the base model."""
        arrivals: dict[Adapter, float] = {}
        for request in requests:
            if (adapter := request.adapter) is not None:
                arrivals[adapter] = min(request.arrival_time, arrivals.get(adapter, math.inf))
        if self.max_adapters is None or len(arrivals) <= self.max_adapters:
            return requests
        chosen = self._with_index(requests, {each: self._since(each, then) for each, then in arrivals.items()}, now)
        return [request for request in requests if request.adapter is None or request.adapter in chosen]

    def _with_index(self, requests: Sequence[Request], since: Mapping[Adapter, float], now: float) -> set[Adapter]:
        """Return as many adapters of `requests` as a step may have. since: when each had a step last."""
        chosen = {adapter for adapter in since if adapter in self._last}
        others = sorted(since.keys() - chosen, key=lambda each: (since[each], each.name, each.version))
        num_free = max(0, (self.max_adapters or 0) - len(chosen))
        recipients: list[Adapter | None] = [each for each in others[num_free:] if since[each] < now - self._patience]
        if recipients and (donors := self._may_give_index(requests, now)):
            self._leave_one(recipients, since, now)
            for donor, recipient in zip(donors, recipients, strict=False):
                if recipient is not None:
                    chosen.remove(donor)
                    chosen.add(recipient)
        return chosen.union(others[:num_free])

    def _leave_one(self, recipients: list[Adapter | None], since: Mapping[Adapter, float], now: float) -> None:
        """Put None among the recipients of indices, longest wait first, at the rank of an overdue waiting request.

        If the request doesn't take the index, because it lacks pages or its adapter, no further index is left for one
        until the adapter that lost its turn has had one, even if its requests were preempted and wait again.
        """
        if self._denied in since or self._denied in self._waiting.by_adapter:
            return
        first = islice(self._waiting, _MOST_WAITING)
        waits = [self._since(each.adapter, each.arrival_time) for each in first if each.adapter not in (None, *since)]
        oldest = min(waits, default=math.inf)
        if oldest < now - self._patience:
            self._denied = recipients[0]
            recipients.insert(sum(each is not None and since[each] <= oldest for each in recipients), None)

    def _may_give_index(self, requests: Sequence[Request], now: float) -> list[Adapter]:
        """Return the adapters of `requests` that may give their index, the last in the order first."""
        num_adapters = len(self._running.by_adapter().keys() | self._waiting.by_adapter.keys())
        turn = min(self._patience, LONGEST_ROUND) * min(1.0, (self.max_adapters or 1) / max(1, num_adapters))
        old = [adapter for adapter, since in self._last.items() if since <= now - turn]
        if not old:
            return []
        firsts = dict.fromkeys(request.adapter for request in self._service.order(requests))
        return [adapter for adapter in reversed(firsts) if adapter is not None and adapter in old]

    def _since(self, adapter: Adapter | None, arrival: float) -> float:
        """Return the time since which an adapter has had no step. arrival: of its first request."""
        return arrival if adapter is None else max(arrival, self._ran.get(adapter, arrival))

    @property
    def index_donors(self) -> list[Adapter]:
        """Adapters that may give their index to a waiting request in this step, the first one first."""
        if self._index_donors is None:
            self._index_donors = self._may_give_index(self._candidates, self._now)
        return self._index_donors

    def lacks_index(self, adapter: Adapter) -> bool:
        """True if every index of the step belongs to another adapter."""
        most, adapters = self.max_adapters, self._adapters
        return most is not None and adapter not in adapters and len(adapters) >= most

    def may_take_index(self, adapter: Adapter, head: Request) -> bool:
        """True if another adapter may give its index to an adapter without one. head: the first request for it.

        If the adapter has running sequences, these have their turn first.
        """
        is_overdue = self._since(adapter, head.arrival_time) < self._now - self._patience
        return is_overdue and adapter not in self._running.by_adapter() and bool(self.index_donors)

    def any_may_take_index(self, waiting: Iterable[Request]) -> bool:
        """True if a waiting request may be overdue for an index, and an adapter has one to give."""
        if self.max_adapters is None or not self._gives_indices or len(self._adapters) < self.max_adapters:
            return False
        oldest = next(iter(waiting), None)
        is_overdue = oldest is not None and oldest.arrival_time < self._now - self._patience
        return is_overdue and bool(self.index_donors)

    def keep_indices(self) -> None:
        """Give no more indices in this step: no waiting request is left that could get one."""
        self._gives_indices = False

    def take_index(self, adapter: Adapter) -> Adapter | None:
        """Give an index to the adapter of a request that begins; return the donor, if it needs one.

        If a request is preempted for a waiting one, its index is free from the next step on.
        """
        donor = None
        if self.lacks_index(adapter):
            self._denied = None
            donor = self.index_donors.pop(0)
            self._adapters.remove(donor)
        self._adapters.add(adapter)
        return donor

    def count_left_out(self) -> int:
        """Count the running sequences that are descheduled because their adapters have no index: they use no slot."""
        most, adapters = self.max_adapters, self._adapters
        if most is None or len(adapters) < most:
            return 0
        left_out = [group for each, group in self._running.by_adapter().items() if each and each not in adapters]
        return sum(is_eligible(request, self._eligible) for group in left_out for request in group)

    # -- pages

    @property
    def growth(self) -> Growth:
        """Pages that the running requests are expected to grow by."""
        if self._growth is None:
            self._growth = Growth(self._service.lengths, self._memory.layout, self._running)
        return self._growth

    def take_pages(self, request: Request) -> None:
        """Count the growth of a request that begins."""
        if self._growth is not None:
            self._growth.add(request)
        if request is self.recipient:
            self.recipient = None

    def bar(self, tenant: str) -> None:
        """Let a tenant whose request lacks pages begin no more requests."""
        self._barred.add(tenant)
        self.num_short += 1

    def note_victim(self, request: Request) -> None:
        """Record that a running request was preempted for a waiting one."""
        self._growth = self._level = None
        self._barred.add(request.fairness_key)
        if self._candidates is self._running or request in self._candidates:
            self.drop_slot(request.fairness_key)
        else:
            self.note_cost(request.fairness_key)

    def is_within_share(self, request: Request) -> bool:
        """True if a tenant stays within its share of the pages when a request begins."""
        pages = self.growth.by_tenant[request.fairness_key] + self.growth.final_pages(request)
        return pages <= self._share(request.fairness_key)

    def find_victims(self, request: Request, *, is_overdue: bool) -> list[Request]:
        """Return the requests to preempt for one that lacks pages; none if others need theirs.

        First a descheduled request, for any tenant that may get a slot of another; then running ones, for a tenant
        below its share of the pages; then one, for a tenant that is overdue for a turn, with no running request.
        """
        tenant = request.fairness_key
        may_take_slot = self.may_take_slot(tenant)
        if may_take_slot and (descheduled := self._last_descheduled(tenant)) is not None:
            return [descheduled]
        if victims := self.beyond_shares(request):
            self._record_victims(request, victims)
            return victims
        return [victim] if may_take_slot and is_overdue and (victim := self._last_running()) is not None else []

    def beyond_shares(self, request: Request) -> list[Request]:
        """Return the requests to preempt for a request within its tenant's share, all in the step before requests were
        admitted; none if restoring the latest victims costs too much.
        """
        running, left = self._running, self._running.tenants.copy()
        if not any(count > 1 and each != request.fairness_key for each, count in left.items()):
            return []
        if self._now < self._next_preemption or not self.is_within_share(request):
            return []
        growth = self.growth
        pages = growth.by_tenant.copy()
        donors = {
            tenant
            for tenant, count in left.items()
            if count > 1 and tenant != request.fairness_key and pages[tenant] > self._share(tenant)
        }
        if not donors:
            return []
        lacking = growth.final_pages(request) + growth.total - self._memory.num_available_pages
        victims: list[Request] = []
        own_pages = dict(zip(running, growth.finals, strict=True))
        earlier = [each for each in self._earlier() if each.fairness_key in donors]
        for victim in reversed(self._service.order(earlier)):
            tenant, own = victim.fairness_key, own_pages[victim]
            if victim is running[0] or left[tenant] < 2 or pages[tenant] - own < self._share(tenant):
                continue
            left[tenant] -= 1
            pages[tenant] -= own
            victims.append(victim)
            lacking -= own
            if lacking <= 0:
                return victims
        return []

    def _record_victims(self, request: Request, victims: Sequence[Request]) -> None:
        """Record that `victims` are preempted for a request within its share."""
        costs, pages_of, now = self._costs, self._memory.layout.pages_for_tokens, self._now
        pages = sum([pages_of(victim.room) for victim in victims])
        seconds = pages * (costs.swapped_page if self._memory.may_swap() else costs.prefix_page)
        self._next_preemption = max(self._next_preemption, now - RESTORE_WINDOW_SECONDS) + seconds / RESTORE_SHARE
        self.recipient, self._gave_pages, self._preempted_at = request, {each.fairness_key for each in victims}, now

    def _last_descheduled(self, tenant: str) -> Request | None:
        """Return the newest descheduled request of another tenant; None if there is none.

        Requests whose KV is being restored, and requests of ineligible adapters, keep their pages.
        """
        if len(self._candidates) >= len(self._running):
            return None
        scheduled = {*self._admitted, *self._candidates}
        for request in reversed(self._running):
            if is_eligible(request, self._eligible) and request not in scheduled and request.fairness_key != tenant:
                return request
        return None

    def _last_running(self) -> Request | None:
        """Return the request to preempt for another tenant; None if its tenant would keep none."""
        earlier = self._earlier()
        victim = self._service.last(earlier) if len(earlier) > 1 else None
        if victim is None or victim is self._running[0] or self._running.tenants[victim.fairness_key] < 2:
            return None
        return victim

    def _earlier(self) -> list[Request]:
        """Return the running requests that had a sequence in this step before requests were admitted."""
        had = set(self._candidates) - self._admitted
        return [request for request in self._running if request in had]

    def _share(self, tenant: str) -> float:
        if self._level is None:
            waiting, weights, growth = self._waiting.tenants, self._weights, self.growth
            others = len(waiting) + sum([weight - 1 for each, weight in weights.items() if each in waiting])
            wanted = {each: pages for each, pages in growth.by_tenant.items() if each not in waiting}
            held = sum([self._memory.layout.pages_for_tokens(request.room) for request in self._running])
            self._level = max_min_level(self._memory.num_available_pages + held, wanted, weights, others)
        return self._level * self._weights.get(tenant, 1.0)


def is_eligible(request: Request, adapters: Collection[Adapter | None] | None) -> bool:
    """True unless a running request's KV is still being restored, or its adapter is none of `adapters` (None: all)."""
    return request.restoring is None and (adapters is None or request.adapter in adapters)
