"""An engine's sleep: its KV cache and its adapters' pages leave memory, and host copies of adapters stay.

Tests: tests/core/test_sleep.py
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from .requests.request_params import InvalidRequest

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""Longest wait for copies and reads that still write to pages."""

POLL_SECONDS = 0.005


class CannotSleep(RuntimeError):
    """Copies into or out of pages have not ended in time; the engine is awake."""


class Sleep:
    """An engine that sleeps, until `wake`; no step may run meanwhile.

    Requests in progress go back to the queue, without pages. They continue after `wake`, token for token, from KV that
    is computed again or was swapped to host memory.
    """

    def __init__(self, engine: Engine) -> None:
        """Free all pages and give their memory back to the system.

        Raises InvalidRequest if the executor can't, and CannotSleep.
        """
        release = engine.executor.release_pages
        if release is None:
            raise InvalidRequest("level", "only an engine that runs on the CPU, with one TP rank, can sleep")
        self._engine = engine
        engine.unmerge()
        engine.reset_prefix_cache(reset_running_requests=True)
        store = engine.store
        store.pins.sleep()
        for adapter in list(store.resident()):
            store.evict(adapter)
        engine.reclaimer.reclaim_all()
        if not self._settled():
            self.wake()
            raise CannotSleep("adapters are still being read, or KV copied; try again")
        release()

    def wake(self) -> None:
        """Load the adapters again that are pinned by now; the other ones come back with their requests."""
        for adapter, error in self._engine.store.pins.wake():
            log.warning("adapter %s is no longer pinned, since it can't be loaded: %s", adapter.name, error)

    def _settled(self) -> bool:
        """Wait until nothing uses a page; False if that takes too long."""
        pool, until = self._engine.pool, time.monotonic() + SETTLE_SECONDS
        while pool.num_free < pool.num_usable:
            if time.monotonic() > until:
                return False
            self._engine.scheduler.finish_copies()
            time.sleep(POLL_SECONDS)
        return True
