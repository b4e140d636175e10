"""Shares of the pages: a tenant below its share takes pages from tenants above theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...memory.pages.eviction import RestoreCosts
from ..config import EngineConfig
from ..requests.request import Request
from .draft import Draft
from .output_lengths import Growth
from .request_memory import RequestMemory
from .running import Running
from .waiting import WaitingQueue

TAKEN_SHARE = 0.04
"""Part of the time that may go into restoring requests preempted for a tenant's share, over `TAKING_SECONDS`. Chosen:
below the twentieth of an engine's throughput that shares may cost.
"""
TAKING_SECONDS = 10.0


class PageShares:
    """Divides the pages for KV by weight among the tenants with requests in progress.

    A running request counts with the pages that it is expected to end with. A request that lacks pages, and with which
    its tenant stays within its share, takes them from the requests at the end of the order (`Service.order`). Each
    tenant keeps a request, and its share; the oldest request of all is no victim. Pages that no tenant needs for its
    share are for any tenant.
    """

    def __init__(self, limits: EngineConfig, waiting: WaitingQueue, memory: RequestMemory, costs: RestoreCosts) -> None:
        self._weights, self._patience = limits.weights, limits.max_overtake_seconds
        self._waiting = waiting
        self._memory = memory
        self._costs = costs
        self._of: Growth | None = None
        self._unit = 0.0  # pages of a tenant of weight 1 in the step of that growth
        self.taker: Request | None = None
        """The last request that pages were taken for."""
        self._givers: set[str] = set()  # tenants that it took them from
        self._taken_at = self._next_taking = -math.inf

    def givers(self, now: float) -> set[str]:
        """Return the tenants that must begin nothing yet: while `taker` waits, for the pages taken from them."""
        return self._givers if now < self._taken_at + self._patience else set()

    def allow(self, request: Request, running: Running, growth: Growth) -> bool:
        """True if a tenant stays within its share when a request begins. growth: of `running`."""
        if growth is not self._of:
            self._of, self._unit = growth, self._share_of_one(running)
        pages = growth.by_tenant[request.account] + growth.final_pages(request)
        return pages <= self._share(request.account)

    def find_victims(self, request: Request, draft: Draft, growth: Growth) -> list[Request]:
        """Return the requests to preempt for a request, all with a row since before the step; none if others need their
        pages, if it would go beyond its tenant's share, or if restoring the latest victims costs too much.
        """
        running = draft.running
        if draft.now < self._next_taking or not self.allow(request, running, growth):
            return []
        pages, left = growth.by_tenant.copy(), dict(running.accounts)
        givers = {
            account
            for account, count in left.items()
            if count > 1 and account != request.account and pages[account] > self._share(account)
        }
        if not givers:
            return []
        lacking = growth.final_pages(request) + growth.total - self._memory.num_available_pages
        victims: list[Request] = []
        own_pages = growth.of_running()
        for victim in draft.from_end(givers):
            account, own = victim.account, own_pages[victim]
            if victim is running[0] or left[account] < 2 or pages[account] - own < self._share(account):
                continue
            left[account] -= 1
            pages[account] -= own
            victims.append(victim)
            lacking -= own
            if lacking <= 0:
                return victims
        return []

    def record_victims(self, request: Request, victims: Sequence[Request], now: float) -> None:
        """Record that `victims` are preempted for a request."""
        costs, pages = self._costs, sum(victim.room for victim in victims) // self._memory.block_tokens
        seconds = pages * (costs.swapped_page if self._memory.may_swap() else costs.prefix_page)
        self._next_taking = max(self._next_taking, now - TAKING_SECONDS) + seconds / TAKEN_SHARE
        self.taker, self._givers, self._taken_at = request, {victim.account for victim in victims}, now

    def _share(self, account: str) -> float:
        return self._unit * self._weights.get(account, 1.0)

    def _share_of_one(self, running: Running) -> float:
        waiting, accounts = self._waiting.accounts, running.accounts
        total = len(waiting) + sum(account not in waiting for account in accounts)
        total += sum(weight - 1 for each, weight in self._weights.items() if each in waiting or each in accounts)
        held = sum(request.room for request in running) // self._memory.block_tokens
        return (self._memory.num_available_pages + held) / total
