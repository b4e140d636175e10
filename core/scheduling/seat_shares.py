"""Shares of a step's rows: which tenants keep theirs when more requests run than the step has rows."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence, Set

from ...memory.adapters.adapter import Adapter
from ..requests.request import Request
from .running import Running

WINDOW_SECONDS = 10.0
"""Time constant of the exponential decay of a tenant's served cost. Chosen: as long as a turn."""


Giver = tuple[float, int, int, str]
"""A tenant's served cost and its rows, both negated, its index among the step's tenants, and the tenant."""


class SeatShares:
    """Deals the rows of a step to tenants by their recently served cost.

    Served cost is the queue policy's cost of a tenant's running requests and of its recently ended requests. With every
    slot taken, a tenant may still begin a request if it has no row, or if its served cost is below the giver's. The
    giver is the tenant with the highest served cost among tenants with two or more rows; its newest decoding request is
    paused: it keeps its pages and state, nothing is recomputed, and it resumes when a row is free. Each tenant keeps at
    least one row (its oldest request). A tenant with a paused request admits no new one. A request keeps its row in the
    step that admits it.
    """

    def __init__(self, max_rows: int, running: Running, clock: Callable[[], float]) -> None:
        """max_rows: of a step. running: the running requests; the scheduler changes it."""
        self._max_rows = max_rows
        self._running = running
        self._clock = clock
        self._held: dict[str, float] = {}  # cost of running requests, by tenant
        self._ended: dict[str, tuple[float, float]] = {}  # decayed cost of ended requests, and its time
        self._taking: Sequence[Request] = running  # requests with a row in the step being planned
        self._only: Collection[Adapter | None] | None = None  # adapters eligible for a row; None: all
        self._begun: set[Request] = set()
        self._rows: dict[str, int] = {}  # number of rows by tenant, with admitted requests
        self._yields: dict[str, int] = {}  # of these, rows that admitted requests may take
        self._now = 0.0  # of the step
        self._known: dict[str, float] = {}  # `given` at that time, cached
        self._givers: list[Giver] | None = None  # a heap; None until first needed
        self._places: dict[str, int] = {}  # index of a tenant, in the order of the step's rows
        self._entries: dict[str, Giver] = {}  # the heap's valid entries, by tenant

    # -- served cost

    def begin(self, request: Request) -> None:
        """Record an admitted request, already charged to its tenant, and the row that it takes."""
        account = request.account
        self._held[account] = self._held.get(account, 0.0) + request.charged
        self._begun.add(request)
        if request.coming is None:  # else it has nothing to compute yet
            self._rows[account] = self._rows.get(account, 0) + 1
        self._change(account)
        if request.coming is None and sum(self._rows.values()) > self._max_rows and (giver := self._giver) is not None:
            self._take_row(giver)

    def end(self, request: Request, expected: float) -> None:
        """Record that a request has left the running ones and was settled. expected: its cost when it began."""
        account, now = request.account, self._clock()
        self._held[account] -= expected
        if account not in self._running.accounts:
            del self._held[account]
        self._ended[account] = self._lately(account, now) + request.charged, now
        self._change(account)
        if len(self._ended) > 2 * self._max_rows + 64:  # drop the smallest costs
            kept = sorted(self._ended, key=lambda each: self._lately(each, now))[-self._max_rows - 32 :]
            self._ended = {each: self._ended[each] for each in kept}

    def given(self, account: str) -> float:
        """Return a tenant's served cost."""
        return self._held.get(account, 0.0) + self._lately(account, self._clock())

    def _lately(self, account: str, now: float) -> float:
        cost, then = self._ended.get(account, (0.0, now))
        return cost * math.exp((then - now) / WINDOW_SECONDS)

    # -- rows

    def deal(self, requests: Sequence[Request], begun: Container[Request] = ()) -> list[Request]:
        """Return the `max_rows` of `requests` that share a step. requests: in order of admission. begun: requests that
        keep their row in any case.
        """
        kept = set(self.order(requests, begun)[: self._max_rows])
        return [request for request in requests if request in kept]

    def order(self, requests: Sequence[Request], begun: Container[Request] = ()) -> list[Request]:
        """Return requests in the order in which they keep rows and pages: those of `begun`, the first of each tenant,
        then those of the tenants with the lowest served cost. requests: in order of admission.

        In a tenant prompts come first, so that a prompt that has begun is computed to its end; the newest is last.
        """
        given = {account: self.given(account) for account in dict.fromkeys(request.account for request in requests)}
        counts: Counter[str] = Counter()
        keys: dict[Request, tuple[bool, bool, float, int]] = {}
        for request in sorted(requests, key=lambda each: (each not in begun, _decodes(each))):
            account = request.account
            keys[request] = request not in begun, counts[account] > 0, given[account], counts[account]
            counts[account] += 1
        return sorted(keys, key=keys.__getitem__)

    def begin_step(self, taking: Sequence[Request], only: Collection[Adapter | None] | None = None) -> None:
        """Begin a step, before requests are admitted to it.

        taking: the running requests with a row in it. only: eligible adapters; None: all.
        """
        self._taking, self._begun, self._only = taking, set(), only
        all_running = len(taking) == len(self._running)
        accounts = self._running.accounts if all_running else Counter(request.account for request in taking)
        self._rows, self._yields = dict(accounts), dict(accounts)
        self._known, self._givers, self._now = {}, None, self._clock()

    def is_open_to(self, waiting: Set[str]) -> bool:
        """True if one of the waiting tenants may begin a request although every slot is taken."""
        running = self._running.accounts
        if self._giver is None:
            return False
        if len(running) < self._max_rows and not waiting <= running.keys():
            return True
        return len(running) > 1 and any(map(self.may_begin, running.keys() & waiting))

    def may_begin(self, account: str) -> bool:
        """True if a tenant may begin a request although every slot is taken: another can give it a row."""
        own, accounts = self._rows.get(account, 0), self._running.accounts
        if not self._rows:  # no request runs, or none can compute yet
            return False
        if own < accounts.get(account, 0):  # some of its own are paused
            return False
        if not own and len(accounts) >= self._max_rows:  # each tenant keeps a row
            return False
        giver = self._giver
        return giver is not None and (not own or self._given(account) < self._given(giver))

    def sitting_out(self, account: str) -> Request | None:
        """Return the newest paused request of another tenant; None if there is none.

        Requests with KV being copied back, and requests that `only` excludes, keep their pages and are not returned.
        """
        if len(self._taking) >= len(self._running):
            return None
        taking, only = self._begun.union(self._taking), self._only
        for request in reversed(self._running):
            may_run = request.coming is None and (only is None or request.adapter in only)
            if may_run and request not in taking and request.account != account:
                return request
        return None

    def earlier(self) -> list[Request]:
        """Return the running requests that had a row of the step before requests were admitted to it."""
        had = set(self._taking).difference(self._begun)
        return [request for request in self._running if request in had]

    def free_row(self, request: Request) -> None:
        """Free the row of a request that had it before this step's admission and goes back to the queue."""
        self._take_row(request.account)

    def _take_row(self, account: str) -> None:
        self._rows[account] -= 1
        self._yields[account] -= 1
        self._change(account)

    def _given(self, account: str) -> float:
        """Return `given` as of this step."""
        given = self._known.get(account)
        if given is None:
            given = self._held.get(account, 0.0) + self._lately(account, self._now)
            self._known[account] = given
        return given

    @property
    def _giver(self) -> str | None:
        """The tenant that gives a row to the next admitted request: highest served cost among tenants with two or more
        rows. None if no tenant has one to give.
        """
        givers = self._givers
        if givers is None:
            givers, self._entries = [], {}
            self._givers, self._places = givers, {account: place for place, account in enumerate(self._yields)}
            for account in self._places:
                self._enter(account)
        while givers and self._entries.get(givers[0][3]) is not givers[0]:
            heapq.heappop(givers)
        return givers[0][3] if givers else None

    def _change(self, account: str) -> None:
        """Update the heap after a tenant's rows or served cost have changed."""
        self._known.pop(account, None)
        if self._givers is not None and account in self._yields:
            self._entries.pop(account, None)
            self._enter(account)

    def _enter(self, account: str) -> None:
        rows = self._rows[account]
        if rows > 1 and self._yields[account] > 0 and self._givers is not None:
            entry = self._entries[account] = -self._given(account), -rows, self._places[account], account
            heapq.heappush(self._givers, entry)


def _decodes(request: Request) -> bool:
    return request.num_tokens - request.num_computed_tokens == 1
