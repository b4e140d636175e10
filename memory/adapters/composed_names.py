"""Composed adapters by name, each with the tenants that request it: one tenant's forget none of another's.

Tests: tests/memory/adapters/test_composed_names.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ValuesView
from typing import Generic, TypeVar

MAX_COMPOSED = 64
"""Composed adapters that are kept for a tenant without requests; those that it requested longest ago are forgotten."""

V = TypeVar("V")


class ComposedNames(Generic[V]):
    """Maps names to composed adapters."""

    def __init__(self) -> None:
        self._all: dict[str, V] = {}
        self._of_tenant: dict[str, OrderedDict[str, None]] = {}  # names, the latest requested last

    def get(self, name: str) -> V | None:
        return self._all.get(name)

    def values(self) -> ValuesView[V]:
        return self._all.values()

    def put(self, name: str, adapter: V) -> None:
        self._all[name] = adapter

    def pop(self, name: str) -> None:
        """Forget an adapter, for all tenants."""
        del self._all[name]
        for tenant, names in list(self._of_tenant.items()):
            names.pop(name, None)
            if not names:
                del self._of_tenant[tenant]

    def request(self, name: str, tenant: str, forget: Callable[[V], object]) -> None:
        """Note that a tenant requests an adapter. forget: called with those that no tenant has among its latest any
        longer; it calls `pop`.
        """
        names = self._of_tenant.setdefault(tenant, OrderedDict())
        names[name] = None
        names.move_to_end(name)
        while len(names) > MAX_COMPOSED:
            oldest, _ = names.popitem(last=False)
            if not any(oldest in each for each in self._of_tenant.values()):
                forget(self._all[oldest])
