"""The eye on an engine that may hang: it says so to /health, and ends the requests that would wait for ever."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import EngineWorker

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Watchdog:
    """A daemon thread that looks at a worker's progress twice a second.

    What takes longer than `stall_seconds` makes the worker unhealthy until it ends; a step that takes longer than
    `give_up_seconds`, or requests that no step served for so long, end with an error.
    """

    def __init__(
        self, worker: EngineWorker, stall_seconds: float, give_up_seconds: float, load_seconds: float = 30.0
    ) -> None:
        """load_seconds: how long a load over HTTP may take; then its client has been told, and it counts no more."""
        self._worker = worker
        self._stall_seconds = stall_seconds
        self._give_up_seconds = give_up_seconds
        self._load_limit = min(give_up_seconds, load_seconds)
        self._stopped = threading.Event()
        self._gave_up = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="chorus-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        """Hold the worker's progress against the limits, once."""
        worker, progress = self._worker, self._worker.progress
        hang = max(progress.turn_seconds(), progress.waiting_seconds())
        stalled = None
        if hang > self._stall_seconds:
            stalled = f"the engine has not finished a step for {hang:.0f} s"
        elif (seconds := self._load_seconds()) > self._stall_seconds:
            stalled = f"an adapter has been loading for {seconds:.0f} s"
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

    def _load_seconds(self) -> float:
        """Seconds that the slowest load under way has taken, asked for over HTTP or needed by requests."""
        stats = self._worker.stats
        needed = stats.oldest_read_seconds if stats.num_running or stats.num_waiting else 0.0
        return max(needed, self._worker.progress.load_seconds(self._load_limit))

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self.look()
            except Exception:
                log.exception("the watchdog failed")
