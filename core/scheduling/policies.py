"""The policy that a scheduler takes from outside: the service that tenants received, which orders them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Protocol

from ..requests.request import Request


class QueuePolicy(Protocol):
    """Orders tenants by the service that they received. account: a tenant's name or, with `fair_by="adapter"`, an
    adapter's.
    """

    def arrive(self, account: str, waiting: Collection[str], least: float | None) -> None:
        """Record that a tenant's queue is no longer empty. waiting: the other waiting tenants. least: the lowest of
        their standings, None if there are none.
        """
        ...

    def standing(self, account: str) -> float:
        """Return a tenant's sort key: the lowest comes next. While the tenant waits, only `charge` and `settle` change
        it.
        """
        ...

    def charge(self, request: Request, length: int) -> None:
        """Charge a request that begins to run from `began_at` and is expected to end with `length` tokens computed.

        Sets `charged` to its cost.
        """
        ...

    def settle(self, request: Request) -> None:
        """Replace the expected charge of a request that no longer runs by the cost of what it has computed."""
        ...


PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""Cost of a prompt token and of a generated one, VTC's w_p and w_q: a decode step computes one token with the weights
that a prompt's step computes hundreds with."""

_MOST_ACCOUNTS = 4096


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
        self._counters: OrderedDict[str, float] = OrderedDict()  # least recently arrived or charged first
        self._level = 0.0  # counter of the tenant served last, before its charge

    @property
    def counters(self) -> Mapping[str, float]:
        """Counters of the recently served tenants."""
        return self._counters

    def arrive(self, account: str, waiting: Collection[str], least: float | None) -> None:
        level = self._level if least is None else least
        self._counters[account] = max(level, self._counters.get(account, level))
        self._counters.move_to_end(account)
        self._bound(waiting)

    def standing(self, account: str) -> float:
        return self._counters.get(account, self._level)

    def charge(self, request: Request, length: int) -> None:
        counter = self.standing(request.account)
        self._level = counter
        request.charged = self._cost(request, length)
        self._counters[request.account] = counter + request.charged
        self._counters.move_to_end(request.account)

    def settle(self, request: Request) -> None:
        actual = self._cost(request, request.num_computed_tokens)
        self._counters[request.account] = self.standing(request.account) + actual - request.charged
        request.charged = actual
        request.num_paid_tokens = max(request.num_paid_tokens, request.num_computed_tokens)

    def _cost(self, request: Request, end: int) -> float:
        """Return the weighted cost of a request's tokens up to `end` that were neither cached nor paid for before."""
        begin = max(request.began_at, request.num_paid_tokens)
        if end <= begin:
            return 0.0
        outputs = max(0, end - max(begin, request.num_prompt_tokens))
        cost = PROMPT_COST * (end - begin - outputs) + OUTPUT_COST * outputs
        return cost / self._weights.get(request.account, 1.0)

    def _bound(self, waiting: Collection[str]) -> None:
        """Forget the least recently served tenants that do not wait; a forgotten tenant returns as a new one."""
        while len(self._counters) > _MOST_ACCOUNTS + len(waiting):
            account, counter = self._counters.popitem(last=False)
            if account in waiting:
                self._counters[account] = counter
