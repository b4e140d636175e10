"""Shares of tenants, by weight, in the tokens of a step or in the pages.

Tests: tests/core/scheduling/test_scheduling.py, tests/core/scheduling/test_service.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from ...memory.pages.eviction import RestoreCosts
from ..config import EngineConfig
from ..requests.request import Request
from .output_lengths import Growth
from .queues import Running, WaitingQueue
from .request_memory import RequestMemory

RESTORE_SHARE = 0.04
"""Part of the time that may go into restoring requests preempted for a tenant's share, over `TAKING_SECONDS`. Chosen:
below the twentieth of an engine's throughput that shares may cost.
"""
RESTORE_WINDOW_SECONDS = 10.0


def max_min_level(
    amount: float, wanted: Mapping[str, float], weights: Mapping[str, float], others: float = 0.0
) -> float:
    """Return the level of a weighted max-min split. Infinite if all tenants get all they want.

    A tenant's share is the amount it wants, or its weight times the level if that is less.

    wanted: by tenant, where bounded. weights: by tenant; by default 1. others: sum of the weights of tenants that want
    all they may have.
    """
    unmet = [(want, weights.get(tenant, 1.0)) for tenant, want in wanted.items()]
    while total := others + sum([weight for _, weight in unmet]):
        level = amount / total
        met = [want for want, weight in unmet if want <= level * weight]
        if not met:
            return level
        amount -= sum(met)
        unmet = [each for each in unmet if each[0] > level * each[1]]
    return math.inf


def have_donor(running: Running, tenant: str) -> bool:
    """True if another tenant than this one has several running requests: from no others are pages taken."""
    return any(count > 1 and each != tenant for each, count in running.tenants.items())


class PageShares:
    """Splits the pages for KV by weight among the tenants with requests in progress (`max_min_level`).

    A tenant with waiting requests wants all it may have, another the pages that its running ones are expected to end
    with. A request that lacks pages, and with which its tenant stays within its share, takes them from the requests at
    the end of the order (`Service.order`). Each tenant keeps a request, and its share; the oldest request of all is no
    victim.
    """

    def __init__(self, limits: EngineConfig, waiting: WaitingQueue, memory: RequestMemory, costs: RestoreCosts) -> None:
        self._weights, self._patience = limits.weights, limits.max_overtake_seconds
        self._waiting = waiting
        self._memory = memory
        self._costs = costs
        self._of: Growth | None = None
        self._level = 0.0  # share of a tenant of weight 1 in the step of that growth
        self.recipient: Request | None = None
        """The last request that others were preempted for, until it begins."""
        self._donors: set[str] = set()  # tenants of the preempted requests
        self._preempted_at = self._next_preemption = -math.inf

    def donors(self, now: float) -> set[str]:
        """Return the tenants that begin nothing yet, unless overdue for a turn: `recipient` waits for their pages."""
        return self._donors if now < self._preempted_at + self._patience else set()

    def is_within_share(self, request: Request, running: Running, growth: Growth) -> bool:
        """True if a tenant stays within its share when a request begins. growth: of `running`."""
        if growth is not self._of:
            self._of, self._level = growth, self._find_level(running, growth)
        pages = growth.by_tenant[request.fairness_key] + growth.final_pages(request)
        return pages <= self._share(request.fairness_key)

    def find_victims(
        self,
        request: Request,
        running: Running,
        growth: Growth,
        now: float,
        from_end: Callable[[Collection[str]], list[Request]],
    ) -> list[Request]:
        """Return the requests to preempt for a request, all in the step before requests were admitted; none if others
        need their pages, if it would go beyond its tenant's share, or if restoring the latest victims costs too much.

        from_end: returns the preemptible requests of some tenants, the last in the order first.
        """
        if now < self._next_preemption or not self.is_within_share(request, running, growth):
            return []
        pages, left = growth.by_tenant.copy(), dict(running.tenants)
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
        for victim in from_end(donors):
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

    def record_victims(self, request: Request, victims: Sequence[Request], now: float) -> None:
        """Record that `victims` are preempted for a request."""
        costs, pages_of = self._costs, self._memory.layout.pages_for_tokens
        pages = sum([pages_of(victim.room) for victim in victims])
        seconds = pages * (costs.swapped_page if self._memory.may_swap() else costs.prefix_page)
        self._next_preemption = max(self._next_preemption, now - RESTORE_WINDOW_SECONDS) + seconds / RESTORE_SHARE
        self.recipient, self._donors, self._preempted_at = request, {victim.fairness_key for victim in victims}, now

    def _share(self, tenant: str) -> float:
        return self._level * self._weights.get(tenant, 1.0)

    def _find_level(self, running: Running, growth: Growth) -> float:
        waiting, weights = self._waiting.tenants, self._weights
        others = len(waiting) + sum([weight - 1 for each, weight in weights.items() if each in waiting])
        wanted = {each: pages for each, pages in growth.by_tenant.items() if each not in waiting}
        held = sum([self._memory.layout.pages_for_tokens(request.room) for request in running])
        return max_min_level(self._memory.num_available_pages + held, wanted, weights, others)
