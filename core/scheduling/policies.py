"""Policies that an engine takes from outside: turns among accounts, and the victim of a preemption."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from ..requests.request import Request
from .mode_policy import ModePolicy, ModePrices


class QueuePolicy(Protocol):
    """Shares what the engine does among accounts: tenants or, where it is configured so, adapters."""

    def arrive(self, account: str, waiting: Collection[str], least: float | None) -> None:
        """Note that an account that had nothing waiting has now. waiting: the other accounts that have. least: the
        lowest of their standings, None where there are none.
        """
        ...

    def standing(self, account: str) -> float:
        """Return a number by which accounts are ordered: the lowest comes next. While an account waits it changes with
        `charge` and `settle` only.
        """
        ...

    def charge(self, request: Request, length: int) -> None:
        """Charge a request that begins to run from `began_at` and is expected to end with `length` tokens computed.

        `charged` is its cost then.
        """
        ...

    def settle(self, request: Request) -> None:
        """Charge a request that runs no more for what it has computed, instead of what was expected."""
        ...


PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""Cost of a prompt token and of a generated one, VTC's w_p and w_q: a decode step computes one token with the weights
that a prompt's step computes hundreds with."""

_MOST_ACCOUNTS = 4096


class TokenCounters(QueuePolicy):
    """Virtual token counters (VTC; Sheng et al., Fairness in Serving Large Language Models): least served comes next.

    An account's counter grows by the cost of what its requests compute, over its weight. They are charged when they
    begin, for the length that is expected of them, and corrected when they end. A request that runs again after a
    preemption is not charged twice.

    An account that comes anew is lifted to the least counter among those that wait or, where nobody does, to that of
    the one served last: what nobody asked for is not saved up. Between two accounts that always wait, the costs served
    over their weights never differ by more than those of the requests that they have running, and one more.
    """

    def __init__(self, weights: Mapping[str, float] = MappingProxyType({})) -> None:
        """weights: by account; 1 where nothing is said."""
        self._weights = weights
        self._counters: OrderedDict[str, float] = OrderedDict()  # who came or was charged least recently first
        self._level = 0.0  # of the account that was served last, before it was

    @property
    def counters(self) -> Mapping[str, float]:
        """Counters of the accounts that were served lately."""
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
        """Forget who was not served for longest and does not wait; should it come back, it is lifted like one that
        comes anew.
        """
        while len(self._counters) > _MOST_ACCOUNTS + len(waiting):
            account, counter = self._counters.popitem(last=False)
            if account in waiting:
                self._counters[account] = counter


class VictimPolicy(Protocol):
    """Chooses the request to preempt when running requests need more pages than there are."""

    def choose(self, running: Sequence[Request]) -> Request:
        """Return one of `running`, which is in order of admission and not empty."""
        ...


class MostServed(VictimPolicy):
    """The newest request of the account that has been served most: it has computed least of what is over a share.

    Never the one that has run longest, as long as there is another: so that preemptions can't go round in circles.
    """

    def __init__(self, queue: QueuePolicy) -> None:
        self._queue = queue

    def choose(self, running: Sequence[Request]) -> Request:
        standing = {account: self._queue.standing(account) for account in {request.account for request in running}}
        if len(standing) == 1:
            return running[-1]
        newest = max(range(1, len(running)), key=lambda index: (standing[running[index].account], index))
        return running[newest]


@dataclass(frozen=True, slots=True)
class Policies:
    """One of each. victim: by default `MostServed` of the queue's accounts. mode: by default that of the configuration.
    prices: what it compares modes by; by default they are learned.
    """

    queue: QueuePolicy = field(default_factory=TokenCounters)
    victim: VictimPolicy = field(default=None)  # pyright: ignore[reportAssignmentType] - see below
    mode: ModePolicy | None = None
    prices: ModePrices | None = None

    def __post_init__(self) -> None:
        if self.victim is None:
            object.__setattr__(self, "victim", MostServed(self.queue))
