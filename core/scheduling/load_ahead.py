"""Loading adapters ahead for waiting requests, and starting requests while their adapter is being read.

Tests: tests/core/scheduling/test_load_ahead.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from weakref import WeakSet

from ...memory.adapters.adapter import Adapter, Tier
from ...memory.adapters.store import AdapterStore
from ...memory.files.error import NoRoom
from ...memory.pages.eviction import RestoreCosts
from ...memory.transfers.transfer import ExecutorLost
from ..cold_start import ColdStart, ColdStarts
from ..config import EngineConfig
from ..requests.request import Request, RequestState
from .queues import WaitingQueue
from .request_memory import RequestMemory

logger = logging.getLogger(__name__)

#: Most waiting requests searched for adapters to read, where some wait for slow reads.
_MOST_LOOKED_AT = 512


@dataclass(eq=False)
class LoadAhead:
    """Reads and loads adapters of the first waiting requests: `lookahead` from disk, `prefetch` into the arena.

    Requests that wait for a slow read are not counted: no request waits for them. A broken adapter raises
    nothing here: its requests get the error when they are about to start.

    refused: failed to load ahead. unfit: not read, because the arena could not hold them.
    """

    limits: EngineConfig
    store: AdapterStore
    memory: RequestMemory
    _refused: WeakSet[Adapter] = field(default_factory=WeakSet)
    _unfit: set[Adapter] = field(default_factory=set)

    def hopeless(self, waiting: Iterable[Request]) -> list[tuple[Request, BaseException]]:
        """Return waiting requests for adapters that can't be loaded, with the error; a failed read is reported once."""
        store = self.store
        store.images.watch()
        if not store.images.has_failures and not self._unfit:
            return []
        found: list[tuple[Request, BaseException]] = []
        for request in waiting:
            adapter = request.adapter
            if adapter is None:
                continue
            if (error := store.images.error(adapter)) is not None:
                found.append((request, error))
            elif adapter in self._unfit and store.unfit((adapter,)):
                found.append((request, _no_room(adapter)))
        store.images.forget_failures()
        self._unfit.clear()
        return found

    def read(self, waiting: Iterable[Request]) -> None:
        """Start reading the adapters of the next waiting requests from disk; `waiting` has them in order."""
        adapters = list(self._first(waiting))
        if unfit := self.store.unfit(adapters):
            self._unfit.update(unfit)
            adapters = [adapter for adapter in adapters if adapter not in self._unfit]
        if adapters:
            self.store.loads.ahead(adapters)

    def _first(self, waiting: Iterable[Request]) -> Iterator[Adapter]:
        """Yield the non-resident adapters of the first requests that wait for no slow read.

        A request sent back for a late adapter that is still being read needs no further read.
        """
        images, left = self.store.images, self.limits.lookahead
        for request in itertools.islice(waiting, max(left, _MOST_LOOKED_AT)):
            adapter = request.adapter
            if adapter is not None:
                if images.is_slow(adapter) or (request.state is RequestState.LATE and images.is_requested(adapter)):
                    continue
                if not adapter.pages:
                    yield adapter
            left -= 1
            if left == 0:
                return

    def load(self, waiting: WaitingQueue) -> None:
        """Load the adapters of the next waiting requests, without evicting adapters that other requests wait for."""
        if not self.limits.prefetch:
            return
        adapters = waiting.adapters()
        wanted = sum(len(adapter.pages) for adapter in adapters if adapter.is_idle)
        for request in itertools.islice(waiting, self.limits.prefetch):
            adapter = request.adapter
            if adapter is None or adapter in self._refused or self.store.tier(adapter) is not Tier.HOST:
                continue
            if not self.memory.make_spare_room(adapter.num_pages, wanted):
                return
            try:
                self.store.prefetch(adapter)
            except ExecutorLost:
                raise
            except Exception as error:
                logger.error("loading %r ahead failed: %s", adapter, error)
                self._refused.add(adapter)
            wanted += adapter.num_pages if adapter.is_idle else 0


def _no_room(adapter: Adapter) -> NoRoom:
    return NoRoom(
        f"adapter {adapter.name!r} needs {adapter.num_pages} pages, more than the page pool has left beside "
        "pinned adapters; unpin some"
    )


@dataclass(slots=True)
class LoadPolicy:
    """Starts a request while its adapter is being read, if the rest of the read can overlap with the prefill.

    The prefill waits for each layer when it reaches it, and with it every other request of the step and every arrival.
    So the rest of the read must not take much longer than the prefill itself.

    starts: counts reads that a request waited for to the end. max_stall: the longest that a step waits for adapters, in
    seconds; rows of adapters that miss it are discarded. 0: no request starts before its adapter has been read.
    """

    store: AdapterStore
    costs: RestoreCosts
    starts: ColdStarts
    pages_per_token: float
    max_stall: float
    _waiting: WeakSet[Adapter] = field(default_factory=WeakSet)

    def may_start(self, adapter: Adapter, num_tokens: int) -> bool:
        """True if a request for `adapter` that would compute so many tokens may start now."""
        if adapter.pages and (adapter.references or not self.store.loads.is_reading(adapter)):
            return True
        may = self._may_start_cold(adapter, num_tokens)
        if not may and self.store.tier(adapter) is Tier.LOADING:
            self._waiting.add(adapter)
        elif may and adapter in self._waiting:
            self._waiting.discard(adapter)
            if self.store.images.is_ready(adapter):
                self.starts.count(ColdStart.WAIT)
        return may

    def _may_start_cold(self, adapter: Adapter, num_tokens: int) -> bool:
        store = self.store
        tier = store.tier(adapter)
        if tier is not Tier.LOADING:
            return tier is not Tier.DISK  # a failed one may: starting it reports the error
        if self.max_stall == 0:
            return False
        most = self.costs.prefix_page * num_tokens * self.pages_per_token + self.max_stall
        return store.loads.seconds_left(adapter, self.max_stall) <= most
