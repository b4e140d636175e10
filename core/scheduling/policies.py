"""Policies that an engine takes from outside: turns among tenants, and the victim of a preemption."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..requests.request import Request
from .mode_policy import ModePolicy


class QueuePolicy(Protocol):
    """Shares what the engine does among tenants. Tokens are what is charged: those computed and those expected."""

    def arrive(self, tenant: str) -> None:
        """A tenant that had nothing waiting has now."""
        ...

    def order(self, tenants: Collection[str]) -> str:
        """Return the tenant whose request is considered next, of those that have one that may run."""
        ...

    def charge(self, request: Request, tokens: int) -> None:
        """A request begins to run and is expected to take so many tokens' work."""
        ...

    def refund(self, request: Request, tokens: int) -> None:
        """A request runs no more and has taken so many fewer than charged, or more where negative."""
        ...


class EvenShares(QueuePolicy):
    """Equal shares: the tenant that has been charged least comes next.

    A new tenant starts at the account of the one that was served last: what nobody asked for is not saved up.
    """

    def __init__(self) -> None:
        self._charged: dict[str, int] = {}
        self._level = 0  # of the tenant that was served last, before it was

    def arrive(self, tenant: str) -> None:
        if len(self._charged) > 256:  # forget those whose account would be lifted anyway
            self._charged = {name: count for name, count in self._charged.items() if count > self._level}
        if self._charged.get(tenant, 0) < self._level:
            self._charged[tenant] = self._level

    def order(self, tenants: Collection[str]) -> str:
        charged, level = self._charged, self._level
        return min(tenants, key=lambda tenant: charged.get(tenant, level))

    def charge(self, request: Request, tokens: int) -> None:
        account = self._charged.get(request.tenant, self._level)
        self._level = max(self._level, account)
        self._charged[request.tenant] = account + tokens

    def refund(self, request: Request, tokens: int) -> None:
        self._charged[request.tenant] = self._charged.get(request.tenant, self._level) - tokens


class VictimPolicy(Protocol):
    """Chooses the request to preempt when running requests need more pages than there are."""

    def choose(self, running: Sequence[Request]) -> Request:
        """Return one of `running`, which is in order of admission and not empty."""
        ...


class NewestFirst(VictimPolicy):
    """The request that was admitted last: it has computed least, and the longest-waiting are never sent back for it."""

    def choose(self, running: Sequence[Request]) -> Request:
        return running[-1]


@dataclass(frozen=True, slots=True)
class Policies:
    """One of each. mode: None leaves it to `Engine.merge` and `unmerge`, and is unmerged until then."""

    queue: QueuePolicy = field(default_factory=EvenShares)
    victim: VictimPolicy = field(default_factory=NewestFirst)
    mode: ModePolicy | None = None
