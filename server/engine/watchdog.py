"""Detects an engine that hangs: /health reports it, and its requests are ended."""

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
"""Most seconds that count between two checks. After a longer gap the whole process was probably stopped."""


class Watchdog(Repeating):
    """Checks every `POLL_SECONDS` that the engine's thread makes progress.

    A step that takes longer than `stall_seconds` makes the worker unhealthy until the step ends. A step that takes
    longer than `give_up_seconds` ends all requests with an error. The same applies if requests wait, no step runs and
    no adapter is being read for them; reads have their own deadlines.

    Only time in which the watchdog ran counts: a stopped process or a suspended machine is not a hanging engine.
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
        self._has_cancelled = False

    def look(self) -> None:
        """Compare the worker's progress with the limits, once."""
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
            log.warning("the engine makes progress again")
        worker.stalled = stalled
        if hang <= self._give_up_seconds:
            self._has_cancelled = False
        elif not self._has_cancelled:
            self._has_cancelled = True
            log.error(
                "%s; cancelling %d requests", stalled, worker.cancel_all(f"{stalled}; this request was cancelled")
            )

    def _turn(self) -> None:
        if not self._stopping.is_set():
            self.look()
