"""The policy that a scheduler takes from outside: the service that tenants received, which orders them."""

from __future__ import annotations

from collections.abc import Collection
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
