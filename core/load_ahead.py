"""Bringing the adapters of waiting requests nearer before those may run."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from weakref import WeakSet

from ..memory.adapter import Adapter, Tier
from ..memory.adapter_error import AdapterFormatError
from ..memory.adapter_store import AdapterStore
from .request import Request
from .request_memory import RequestMemory
from .scheduler_limits import SchedulerLimits
from .waiting import WaitingQueue

logger = logging.getLogger(__name__)

#: Most waiting requests that are looked at for adapters to read, where those of others read slowly.
_MOST_LOOKED_AT = 512


class LoadAhead:
    """Looks at the first waiting requests only: `lookahead` of them for reads, `prefetch` for loads into the arena.

    Those that wait for a slow read don't count among the first, so that nobody waits behind them. Nothing here raises
    for what is wrong with an adapter: its own requests are told when they are to begin.
    """

    def __init__(self, limits: SchedulerLimits, store: AdapterStore, memory: RequestMemory) -> None:
        self._limits = limits
        self._store = store
        self._memory = memory
        self._refused: WeakSet[Adapter] = WeakSet()  # that could not be loaded ahead
        self._unfit: set[Adapter] = set()  # that were not read, because the arena could not hold them

    def hopeless(self, waiting: Iterable[Request]) -> list[tuple[Request, BaseException]]:
        """Waiting requests whose adapter can't be had, and why; each read that failed is told once."""
        store = self._store
        store.watch_reads()
        if not store.has_unreadable and not self._unfit:
            return []
        found: list[tuple[Request, BaseException]] = []
        for request in waiting:
            adapter = request.adapter
            if adapter is None:
                continue
            if (error := store.unreadable(adapter)) is not None:
                found.append((request, error))
            elif adapter in self._unfit and store.unfit((adapter,)):
                found.append((request, AdapterFormatError(
                    f"adapter {adapter.name!r} needs {adapter.num_pages} pages, more than the arena has left beside "
                    "pinned adapters; unpin some"
                )))  # fmt: skip
        store.forget_unreadable()
        self._unfit.clear()
        return found

    def read(self, waiting: Iterable[Request]) -> None:
        """Have the adapters of the next waiting requests read from disk."""
        adapters = list(self._first(waiting))
        if unfit := self._store.unfit(adapters):
            self._unfit.update(unfit)
            adapters = [adapter for adapter in adapters if adapter not in self._unfit]
        if adapters:
            self._store.read_ahead(adapters)

    def _first(self, waiting: Iterable[Request]) -> Iterator[Adapter]:
        """Adapters that are not resident, of the first requests that wait for no slow read."""
        store, left = self._store, self._limits.lookahead
        for request in itertools.islice(waiting, max(left, _MOST_LOOKED_AT)):
            adapter = request.adapter
            if adapter is not None and not adapter.pages:
                if store.is_slow(adapter):
                    continue
                yield adapter
            left -= 1
            if left == 0:
                return

    def load(self, waiting: WaitingQueue) -> None:
        """Have the adapters of the next waiting requests loaded, but not into pages of others that are waited for."""
        adapters = waiting.adapters()
        wanted = sum(len(adapter.pages) for adapter in adapters if adapter.is_idle)
        for request in itertools.islice(waiting, self._limits.prefetch):
            adapter = request.adapter
            if adapter is not None and adapter not in self._refused and self._store.tier(adapter) is Tier.HOST:
                if not self._memory.make_spare_room(adapter.num_pages, wanted):
                    return
                try:
                    self._store.prefetch(adapter)
                except Exception as error:
                    logger.error("loading %r ahead failed: %s", adapter, error)
                    self._refused.add(adapter)
                    continue
                wanted += adapter.num_pages if adapter.is_idle else 0

    def may_load(self, waiting: Iterable[Request]) -> bool:
        """True if an adapter may soon be there to be loaded ahead."""
        window = itertools.islice(waiting, self._limits.prefetch)
        adapters = {request.adapter for request in window if request.adapter is not None}
        there = (Tier.HOST, Tier.FAILED)
        return any(not adapter.pages and self._store.tier(adapter) not in there for adapter in adapters)
