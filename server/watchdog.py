"""Watching an engine that may hang: /health says so, and requests that would wait for ever are ended."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import EngineWorker

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Progress:
    """Times of the engine's turns and of adapter loads. Written by the threads that work, read by any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turn_since: float | None = None
        self._steps: int | None = None
        self._waits_since: float | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._loads: dict[int, float] = {}

    def turn_began(self) -> None:
        """The engine's thread has something to do: a step, or a call."""
        self._turn_since = self._clock()

    def turn_ended(self, waiting_steps: int | None = None) -> None:
        """It is done. waiting_steps: how many steps have run so far, where requests still wait for the next one."""
        self._turn_since = None
        if waiting_steps is None:
            self._steps = self._waits_since = None
        elif waiting_steps != self._steps:
            self._steps, self._waits_since = waiting_steps, self._clock()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count what is done inside as a load under way."""
        with self._lock:
            number = next(self._numbers)
            self._loads[number] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._loads[number]

    def turn_seconds(self) -> float:
        """Seconds that the engine's thread has been at one thing."""
        since = self._turn_since
        return 0.0 if since is None else self._clock() - since

    def waiting_seconds(self) -> float:
        """Seconds that requests have waited without any step, as when the disk does not give their adapters."""
        since = self._waits_since
        return 0.0 if since is None else self._clock() - since

    def load_seconds(self, limit: float) -> float:
        """Seconds that the oldest load has been under way; those that took longer than `limit` are given up by now."""
        now = self._clock()
        with self._lock:
            return max((now - since for since in self._loads.values() if now - since <= limit), default=0.0)


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
