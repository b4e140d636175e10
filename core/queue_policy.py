"""Whose turn it is: the policy that admission asks when several tenants have waiting requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from .request import Request


class QueuePolicy(Protocol):
    """Shares what the engine does among tenants. Tokens are what is charged: those computed and those expected."""

    def arrive(self, tenant: str) -> None:
        """A tenant that had nothing waiting has now."""
        ...

    def order(self, tenants: Collection[str]) -> str:
        """Whose request is considered next, of those who have one that may run."""
        ...

    def charge(self, request: Request, tokens: int) -> None:
        """A request begins to run and is expected to take so many tokens' work."""
        ...

    def refund(self, request: Request, tokens: int) -> None:
        """A request runs no more and has taken so many fewer than charged, or more where negative."""
        ...


class EvenShares(QueuePolicy):
    """Equal shares: next comes whoever has been charged least.

    Whoever comes anew begins where the one is who was served last: what nobody asked for is not saved up.
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
