"""Progress of an engine: what is under way and since when; told by its worker, read by the watchdog."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
