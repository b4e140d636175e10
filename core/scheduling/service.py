"""Fairness among tenants: the ledger of served costs, and the order in which requests keep slots and pages.

Tests: tests/core/scheduling/test_service.py, tests/core/scheduling/test_policies.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ...memory.pages.layout import PageLayout
from ..config import EngineConfig
from ..requests.request import Request
from .queue_order import Turns
from .queues import Running, WaitingQueue, num_missing

if TYPE_CHECKING:
    import numpy as np

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""Cost of a prompt token and of a generated one, VTC's w_p and w_q: a decode step computes one token with the weights
that a prompt's step computes hundreds with."""

_MOST_TENANTS = 4096


class QueuePolicy(Protocol):
    """Orders tenants by the service that they received. tenant: its name or, with `fair_by="adapter"`, an adapter's."""

    def arrive(self, tenant: str, waiting: Collection[str], least: float | None) -> None:
        """Record that a tenant's queue is no longer empty. waiting: the other waiting tenants. least: the lowest of
        their standings, None if there are none.
        """
        ...

    def standing(self, tenant: str) -> float:
        """Return a tenant's sort key; the lowest is next. While it waits, only `charge` and `settle` change it."""
        ...

    def charge(self, request: Request, length: int) -> None:
        """Charge a request that begins to run from `began_at` and is expected to end with `length` tokens computed.

        Sets `charged` to its cost.
        """
        ...

    def settle(self, request: Request) -> None:
        """Replace the expected charge of a request that no longer runs by the cost of the tokens it computed."""
        ...


class TokenCounters(QueuePolicy):
    """Virtual token counters (VTC; Sheng et al., Fairness in Serving Large Language Models): least served comes next.

    A tenant's counter grows by the cost of its requests' tokens, divided by its weight. A request is charged for its
    expected length when it begins, and corrected when it ends. One that runs again after a preemption is not charged
    twice.

    The counter of a returning tenant is lifted to the least counter of the waiting tenants or, if none waits, to that
    of the tenant served last: unused service is not saved up. Between two backlogged tenants, weighted served costs
    differ by at most the cost of their running requests and one more.
    """

    def __init__(self, weights: Mapping[str, float] = MappingProxyType({})) -> None:
        """weights: by tenant; by default 1."""
        self._weights = weights
        self.counters: OrderedDict[str, float] = OrderedDict()
        """Counters of the recently served tenants, the least recently arrived or charged first."""
        self._level = 0.0  # counter of the tenant served last, before its charge

    def arrive(self, tenant: str, waiting: Collection[str], least: float | None) -> None:
        level = self._level if least is None else least
        self.counters[tenant] = max(level, self.counters.get(tenant, level))
        self.counters.move_to_end(tenant)
        self._bound(waiting)

    def standing(self, tenant: str) -> float:
        return self.counters.get(tenant, self._level)

    def charge(self, request: Request, length: int) -> None:
        counter = self.standing(request.fairness_key)
        self._level = counter
        request.charged = self._cost(request, length)
        self.counters[request.fairness_key] = counter + request.charged
        self.counters.move_to_end(request.fairness_key)

    def settle(self, request: Request) -> None:
        actual = self._cost(request, request.num_computed_tokens)
        self.counters[request.fairness_key] = self.standing(request.fairness_key) + actual - request.charged
        request.charged = actual
        request.num_paid_tokens = max(request.num_paid_tokens, request.num_computed_tokens)

    def _cost(self, request: Request, end: int) -> float:
        """Return the weighted cost of a request's tokens up to `end` that were neither cached nor paid for before."""
        begin = max(request.began_at, request.num_paid_tokens)
        if end <= begin:
            return 0.0
        outputs = max(0, end - max(begin, request.num_prompt_tokens))
        cost = PROMPT_COST * (end - begin - outputs) + OUTPUT_COST * outputs
        return cost / self._weights.get(request.fairness_key, 1.0)

    def _bound(self, waiting: Collection[str]) -> None:
        """Forget the least recently served tenants that do not wait; a forgotten tenant returns as a new one."""
        while len(self.counters) > _MOST_TENANTS + len(waiting):
            tenant, counter = self.counters.popitem(last=False)
            if tenant in waiting:
                self.counters[tenant] = counter


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


_FIRST_GUESS, _NUM_REMEMBERED = 256, 128
_ENDLESS = 1 << 40


class OutputLengths:
    """Lengths of the latest answers, from which the length of a running one is estimated.

    Mean residual life: expected remaining length, given that the answer has reached this length. Truncated answers are
    censored: their tokens count, their ends do not. If all were truncated, the request's limit is expected.

    A limit alone says little: most answers end long before the limit that their clients set.
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int]] = deque(maxlen=_NUM_REMEMBERED)  # lengths, and 1 if it ended of itself
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of the sorted lengths from each on
        self._ends: list[int] = []  # number of these that were not truncated
        self._is_new = False

    def __len__(self) -> int:
        """Number of remembered answers."""
        return len(self._latest)

    @property
    def mean(self) -> float:
        """Mean length of the latest answers, truncated ones included; there must be one."""
        return sum([length for length, _ in self._latest]) / len(self._latest)

    def end(self, num_tokens: int, was_cut: bool) -> None:
        """Record the length of an ended answer. was_cut: truncated at its limit."""
        self._latest.append((num_tokens, int(not was_cut)))
        self._is_new = True

    def final_length(self, request: Request) -> int:
        """Return the tokens, prompt included, that a request is expected to end with; the last one needs no KV."""
        return self.final_lengths([request])[0]

    def final_lengths(self, requests: Sequence[Request]) -> list[int]:
        """Return `final_length` of each request."""
        drawn = [len(request.token_ids) - request.num_prompt_tokens for request in requests]
        lengths = {each: self._answer_length(each) + 1 for each in set(drawn)}
        return [
            end if (end := each.num_prompt_tokens + lengths[count]) < each.max_length else each.max_length
            for each, count in zip(requests, drawn, strict=True)
        ]

    def _answer_length(self, drawn: int) -> int:
        """Return the expected length of an answer that has `drawn` tokens; a quarter more if no answer got so far."""
        if self._is_new:
            self._is_new = False
            latest = sorted(self._latest)
            self._sorted = [length for length, _ in latest]
            self._sums = list(accumulate(reversed(self._sorted)))[::-1]
            self._ends = list(accumulate([ended for _, ended in reversed(latest)]))[::-1]
        index = bisect_right(self._sorted, drawn)
        count = len(self._sorted) - index
        if not count:
            return max(drawn + drawn // 4, 0 if any(self._ends[:1]) else _FIRST_GUESS)
        if not self._ends[index]:
            return _ENDLESS
        return drawn + (self._sums[index] - count * drawn) // self._ends[index]


class Growth:
    """Pages that running requests are expected to need beyond the pages that they have."""

    def __init__(self, lengths: OutputLengths, layout: PageLayout, running: Sequence[Request]) -> None:
        self._lengths = lengths
        self._layout = layout
        self._pages_of = layout.pages_for_tokens
        self._running = running
        ends = lengths.final_lengths(running)
        self.finals = layout.pages_for_each([end - 1 for end in ends])
        """Pages that each running request is expected to end with."""
        has = layout.pages_for_each([request.room for request in running])
        grown = [final - pages for final, pages in zip(self.finals, has, strict=True)]
        self.total = sum([pages for pages in grown if pages > 0])
        """Pages by which all of them grow."""
        self._by_tenant: Counter[str] | None = None
        self._ends: np.ndarray | None = None  # `_ends_of` all; computed only if the sum does not fit

    def add(self, request: Request) -> None:
        """Add a running request, the last of them."""
        self.total += self._pages(request, request.room)
        self.finals.append(pages := self.final_pages(request))
        if self._by_tenant is not None:
            self._by_tenant[request.fairness_key] += pages
        if self._ends is not None:
            import numpy as np

            self._ends = np.vstack((self._ends, self._ends_of([request])))

    @property
    def by_tenant(self) -> Counter[str]:
        """Pages that each tenant's running requests are expected to end with."""
        if self._by_tenant is None:
            self._by_tenant = Counter()
            for request, pages in zip(self._running, self.finals, strict=True):
                self._by_tenant[request.fairness_key] += pages
        return self._by_tenant

    def final_pages(self, request: Request) -> int:
        """Return the pages that a request which does not run yet is expected to end with."""
        return self._pages_of(self._lengths.final_length(request) - 1)

    def total_with(self, request: Request) -> int:
        """Return the pages by which they and `request` grow in all; its known tokens count as having pages."""
        return self.total + self._pages(request, request.num_tokens)

    def peak_with(self, request: Request) -> int:
        """Return the most pages, beyond today's, that they and `request` will need at any time while it runs.

        Less than they grow by in all: a request that ends frees its pages while others go on growing. Pages that it
        shares with the prefix cache are not freed. `request` counts as having pages for its known tokens; once it has
        ended, the others need as many as without it.
        """
        import numpy as np  # not above: a command line that only names routing policies does without

        if self._ends is None:
            self._ends = np.array(self._ends_of(self._running), np.int64).reshape(-1, 3)
        layout, count, final = self._layout, request.num_tokens, self._lengths.final_length(request)
        frees = layout.blocks_for_tokens(count) * layout.num_growing + layout.fixed_pages(final - 1)
        own = final - 1 - count, frees, layout.pages_for_tokens(count)
        steps, frees, has = np.vstack((self._ends, own)).T
        order = np.argsort(-steps)  # when a request ends, the earlier ones in this order still run
        block, growing = layout.block_tokens, layout.num_growing
        needs = np.cumsum(frees[order]) * block + np.arange(1, len(steps) + 1) * steps[order] * growing
        most = int(needs[steps[order] <= own[0]].max())
        return max(0, -(-most // block) - int(has.sum()))

    def _pages(self, request: Request, room: int) -> int:
        """Return the pages that a request with room for `room` tokens grows by."""
        return max(0, self.final_pages(request) - self._pages_of(room))

    def _ends_of(self, requests: Sequence[Request]) -> list[tuple[int, int, int]]:
        """For each request, return the steps until it ends, the pages that it frees then if its tokens are today's, and
        how many of these it has now.

        Pages that do not grow without end count as many as at the end.
        """
        layout = self._layout
        block, growing, fixed_pages = layout.block_tokens, layout.num_growing, layout.fixed_pages
        has = layout.pages_for_each([request.room for request in requests])
        ends = []
        for request, final, pages in zip(requests, self._lengths.final_lengths(requests), has, strict=True):
            count, shared = len(request.token_ids), request.began_at // block * growing
            blocks = -(-max(request.room, count) // block)
            ends.append((final - 1 - count, blocks * growing + fixed_pages(final - 1) - shared, pages - shared))
        return ends


WINDOW_SECONDS = 10.0
"""Time constant of the exponential decay of a tenant's served cost. Chosen: as long as a turn."""


class Service:
    """Served cost of each tenant: the queue policy's cost of its running and of its recently ended requests.

    If slots or pages run short, the first request of each tenant keeps its own, then the requests of the tenants with
    the lowest served cost. A request without a slot is descheduled: it keeps its pages and state, nothing is
    recomputed, and it resumes when a slot is free. A request without pages is preempted.
    """

    def __init__(
        self,
        limits: EngineConfig,
        running: Running,
        waiting: WaitingQueue,
        policy: QueuePolicy,
        now: Callable[[], tuple[float, int]],
    ) -> None:
        """running, waiting: the queues; the scheduler changes them. now: the time, and the number of steps so far, by
        which turns go.
        """
        self.max_num_seqs = limits.max_num_seqs
        self.policy = policy
        self.turns = Turns(limits, waiting, policy.standing)
        self._running = running
        self._waiting = waiting
        self._now = now
        self.lengths = OutputLengths()
        self._running_cost: dict[str, float] = {}  # cost of running requests, by tenant
        self._ended: dict[str, tuple[float, float]] = {}  # decayed cost of ended requests, and its time

    def restart_turns(self) -> Turns:
        """Return the turns of the waiting tenants, from the first on."""
        self.turns.restart(*self._now())
        return self.turns

    def arrive(self, tenant: str) -> None:
        """If a tenant's queue is empty, enter the tenant with the policy and in the order of turns."""
        if not self._waiting.has(tenant):
            now = self._now()
            self.policy.arrive(tenant, self._waiting.tenants, self.turns.least(*now))
            self.turns.record_turn(tenant, *now)

    def begin(self, request: Request, length: int) -> None:
        """Charge the tenant of an admitted request for its expected `length` in tokens, and for a turn."""
        self.policy.charge(request, length)
        self.turns.record_turn(request.fairness_key, *self._now())
        self._running_cost[request.fairness_key] = self._running_cost.get(request.fairness_key, 0.0) + request.charged

    def end(self, request: Request) -> None:
        """Replace the charge of a request that no longer runs by the cost of the tokens it computed."""
        tenant, now = request.fairness_key, self._now()[0]
        self._running_cost[tenant] -= request.charged
        self.policy.settle(request)
        self.turns.note(tenant)
        if tenant not in self._running.tenants:
            del self._running_cost[tenant]
        self._ended[tenant] = self._recent_cost(tenant, now) + request.charged, now
        if len(self._ended) > 2 * self.max_num_seqs + 64:  # drop the smallest costs
            kept = sorted(self._ended, key=lambda each: self._recent_cost(each, now))[-self.max_num_seqs - 32 :]
            self._ended = {each: self._ended[each] for each in kept}

    def served_cost(self, tenant: str) -> float:
        """Return a tenant's served cost."""
        return self._running_cost.get(tenant, 0.0) + self._recent_cost(tenant, self._now()[0])

    def order(self, requests: Sequence[Request], begun: Container[Request] = ()) -> list[Request]:
        """Return requests in the order in which they keep slots and pages: `begun` ones, the first of each tenant,
        then the requests of the tenants with the lowest served cost. requests: in order of admission.

        In a tenant prompts come first, so that a prompt that has begun is computed to its end; the newest is last.
        """
        served = self._served_costs(requests)
        counts: Counter[str] = Counter()
        keys: dict[Request, tuple[bool, bool, float, int]] = {}
        for request in sorted(requests, key=lambda each: (each not in begun, num_missing(each) == 1)):
            tenant = request.fairness_key
            keys[request] = request not in begun, counts[tenant] > 0, served[tenant], counts[tenant]
            counts[tenant] += 1
        return sorted(keys, key=keys.__getitem__)

    def choose(self, requests: Sequence[Request], begun: Container[Request] = ()) -> list[Request]:
        """Return the `max_num_seqs` requests that share a step.

        requests: in order of admission. begun: requests that keep their slot in any case.
        """
        kept = set(self.order(requests, begun)[: self.max_num_seqs])
        return [request for request in requests if request in kept]

    def last(self, requests: Sequence[Request]) -> Request:
        """Return the request to preempt: the newest of the tenant at the end of the order. It loses the least work.

        requests: in order of admission.

        Never the oldest, as long as there is another, so that preemptions can't cycle.
        """
        served = self._served_costs(requests)
        if len(served) == 1:
            return requests[-1]
        counts = Counter(request.fairness_key for request in requests)
        keys = {tenant: (counts[tenant] > 1, cost) for tenant, cost in served.items()}
        return requests[max(range(1, len(requests)), key=lambda index: (keys[requests[index].fairness_key], index))]

    def _served_costs(self, requests: Sequence[Request]) -> dict[str, float]:
        return {
            tenant: self.served_cost(tenant) for tenant in dict.fromkeys(request.fairness_key for request in requests)
        }

    def _recent_cost(self, tenant: str, now: float) -> float:
        cost, then = self._ended.get(tenant, (0.0, now))
        return cost * math.exp((then - now) / WINDOW_SECONDS)
