"""Watching an engine that may hang: /health says so, and requests that would wait for ever are ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..executors import Repeating

if TYPE_CHECKING:
    from .backend import Backend

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5

MOST_SECONDS = 2 * POLL_SECONDS
"""Most seconds that count between two looks: in the rest the watchdog did not run, nor, probably, did the engine."""


class Watchdog(Repeating):
    """Looks twice a second whether the engine's thread gets on with its step.

    A step that takes longer than `stall_seconds` makes the worker unhealthy until it ends; one that takes longer than
    `give_up_seconds` ends the requests with an error. So do requests for which no step runs, though nothing is being
    read for them. Reads of adapters have deadlines of their own, and only time in which the watchdog ran counts: that
    of a stopped process or machine does not.
    """

    def __init__(
        self,
        worker: Backend,
        stall_seconds: float,
        give_up_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("watchdog", POLL_SECONDS)
        self._worker = worker
        self._stall_seconds = stall_seconds
        self._give_up_seconds = give_up_seconds
        self._clock = clock
        self._seen: object = None
        self._looked = clock()
        self._hang = 0.0
        self._gave_up = False

    def look(self) -> None:
        """Hold the worker's progress against the limits, once."""
        worker, now, seen = self._worker, self._clock(), self._worker.progress
        if seen is None or seen != self._seen:
            self._hang = 0.0
        else:
            self._hang += min(now - self._looked, MOST_SECONDS)
        self._seen, self._looked, hang = seen, now, self._hang
        stalled = f"the engine has not finished a step for {hang:.0f} s" if hang > self._stall_seconds else None
        if stalled is not None and worker.stalled is None:
            log.error("%s; /health is 503 until it has", stalled)
        elif stalled is None and worker.stalled is not None:
            log.warning("the engine gets on again")
        worker.stalled = stalled
        if hang <= self._give_up_seconds:
            self._gave_up = False
        elif not self._gave_up:
            self._gave_up = True
            log.error("%s; ending %d requests", stalled, worker.give_up(f"{stalled}; this request was given up"))

    def _turn(self) -> None:
        if not self._stopping.is_set():
            self.look()
