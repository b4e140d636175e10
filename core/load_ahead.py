"""Bringing the adapters of waiting requests nearer before those may run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ..memory.adapter import Tier
from ..memory.adapter_store import AdapterStore
from .request import Request
from .request_memory import RequestMemory
from .scheduler_limits import SchedulerLimits


class LoadAhead:
    """Looks at the first waiting requests only: `lookahead` of them for reads, `prefetch` for loads into the arena."""

    def __init__(self, limits: SchedulerLimits, store: AdapterStore, memory: RequestMemory) -> None:
        self._limits = limits
        self._store = store
        self._memory = memory

    def read(self, waiting: Iterable[Request]) -> None:
        """Have the adapters of the next waiting requests read from disk."""
        window = itertools.islice(waiting, self._limits.lookahead)
        adapters = [r.adapter for r in window if r.adapter is not None and not r.adapter.pages]
        if adapters:
            self._store.read_ahead(adapters)

    def load(self, waiting: Sequence[Request]) -> None:
        """Have the adapters of the next waiting requests loaded, but not into pages of others that are waited for."""
        adapters = dict.fromkeys(request.adapter for request in waiting if request.adapter is not None)
        wanted = sum(len(adapter.pages) for adapter in adapters if adapter.is_idle)
        for request in itertools.islice(waiting, self._limits.prefetch):
            adapter = request.adapter
            if adapter is not None and self._store.tier(adapter) is Tier.HOST:
                if not self._memory.make_spare_room(adapter.num_pages, wanted):
                    return
                self._store.prefetch(adapter)
                wanted += adapter.num_pages if adapter.is_idle else 0

    def may_load(self, waiting: Iterable[Request]) -> bool:
        """Whether an adapter may soon be there to be loaded ahead."""
        window = itertools.islice(waiting, self._limits.prefetch)
        adapters = {request.adapter for request in window if request.adapter is not None}
        return any(not adapter.pages and self._store.tier(adapter) is not Tier.HOST for adapter in adapters)
