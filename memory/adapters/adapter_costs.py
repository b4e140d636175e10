"""What adapters cost the engine: the time that their weights hold pages, and the time that their loads take.

Tests: tests/memory/adapters/test_adapter_costs.py
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .adapter import Adapter

LOAD_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds in seconds of the buckets of loads; the last bucket has no bound."""

REST = ""
"""The name of all adapters without a cost of their own: removed ones and compositions."""


class AdapterCost(NamedTuple):
    """What the versions of a name have cost so far."""

    name: str
    page_seconds: float
    """Pages of the pool that held its weights, times the seconds."""
    load_seconds: float
    """Seconds of all of its loads."""
    loads: tuple[int, ...]
    """Loads in each bucket of `LOAD_BUCKETS`."""

    def plus(self, other: AdapterCost) -> AdapterCost:
        """The sum, under this name."""
        loads = tuple(one + two for one, two in zip(self.loads, other.loads, strict=True))
        return AdapterCost(
            self.name, self.page_seconds + other.page_seconds, self.load_seconds + other.load_seconds, loads
        )


def added(costs: Iterable[AdapterCost]) -> list[AdapterCost]:
    """The sums by name."""
    sums: dict[str, AdapterCost] = {}
    for one in costs:
        sums[one.name] = one if one.name not in sums else sums[one.name].plus(one)
    return list(sums.values())


def merged(costs: Iterable[AdapterCost], most: int) -> list[AdapterCost]:
    """The `most` costs with the most loads, each under its name, and the sum of all others under `REST`."""
    by_loads = sorted(costs, key=lambda one: (one.name == REST, -sum(one.loads)))
    named = [one for one in by_loads[:most] if one.name != REST]
    return [*named, *added(one._replace(name=REST) for one in by_loads[len(named) :])]


@dataclass(slots=True)
class _Spent:
    page_seconds: float = 0.0
    load_seconds: float = 0.0
    loads: list[int] = field(default_factory=lambda: [0] * (len(LOAD_BUCKETS) + 1))
    resident: dict[Adapter, tuple[float, int]] = field(default_factory=dict)
    """Resident versions: since when they hold how many pages."""


class AdapterCosts:
    """Adds up costs by name, over all versions of a name. Nothing that it adds up ever falls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: dict[str, _Spent] = {REST: _Spent()}

    def note_pages(self, adapter: Adapter, count: int) -> None:
        """An adapter holds `count` pages from now on."""
        spent, now = self._spent_by(adapter), self._clock()
        since, before = spent.resident.pop(adapter, (now, 0))
        spent.page_seconds += before * (now - since)
        if count:
            spent.resident[adapter] = now, count

    def note_load(self, adapter: Adapter, seconds: float) -> None:
        """A load of an adapter has ended, so many seconds after it began."""
        spent = self._spent_by(adapter)
        spent.load_seconds += seconds
        spent.loads[bisect_left(LOAD_BUCKETS, seconds)] += 1

    def forget(self, name: str) -> None:
        """Add the cost of a name that is gone to the rest's. Its versions that still hold pages are counted there."""
        gone = self._spent.pop(name, None)
        if gone is None:
            return
        rest = self._spent[REST]
        rest.page_seconds += gone.page_seconds
        rest.load_seconds += gone.load_seconds
        rest.loads = [one + two for one, two in zip(rest.loads, gone.loads, strict=True)]
        rest.resident |= gone.resident

    def so_far(self) -> list[AdapterCost]:
        """The costs of all names that have been loaded, and of the rest. It reads one entry after another, so no step
        has to wait for it on another thread than the engine's.
        """
        now = self._clock()
        return [
            AdapterCost(
                name,
                one.page_seconds + sum(count * (now - since) for since, count in list(one.resident.values())),
                one.load_seconds,
                tuple(one.loads),
            )
            for name, one in list(self._spent.items())
        ]

    def _spent_by(self, adapter: Adapter) -> _Spent:
        rest = self._spent[REST]
        if adapter.sources or adapter in rest.resident:
            return rest
        return self._spent.setdefault(adapter.name, _Spent())
