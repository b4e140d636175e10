"""Faults that come again and again: one line when they begin, and one when they end.

Tests: tests/memory/host/test_fault_log.py
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 10
"""Lines of a kind at once."""

LINE_SECONDS = 60.0
"""Seconds until one more line of a kind may be logged, of faults that come and go."""


@dataclass(slots=True)
class _Kind:
    reason: str | None = None
    """Of the fault that lasts; None while it works."""
    num_failed: int = 0
    """Since it worked last."""
    was_logged: bool = False
    lines: float = BURST
    """That may be logged."""
    at: float = 0.0


class FaultLog:
    """Logs changes of state by kind of fault, for any thread: a disk that fails may fail for thousands of blocks."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()

    def failed(self, kind: str, reason: str, about: str) -> None:
        """Note a fault. reason: it is logged once for each in a row. about: the line."""
        with self._lock:
            state = self._kinds.setdefault(kind, _Kind(at=self._clock()))
            state.num_failed += 1
            is_new, state.reason = state.reason != reason, reason
            if not is_new or not self._may_log(state):
                return
            state.was_logged = True
        self._logger.warning("%s; the same is logged again only once it has worked meanwhile", about)

    def worked(self, kind: str) -> None:
        """Note that something worked that may have failed before."""
        state = self._kinds.get(kind)
        if state is None or state.reason is None:
            return
        with self._lock:
            count, was_logged = state.num_failed, state.was_logged
            state.reason, state.num_failed, state.was_logged = None, 0, False
        if was_logged:
            self._logger.warning("%s: it works again, and failed %d times", kind, count)

    def _may_log(self, state: _Kind) -> bool:
        now = self._clock()
        state.lines = min(BURST, state.lines + (now - state.at) / LINE_SECONDS)
        state.at = now
        if state.lines < 1:
            return False
        state.lines -= 1
        return True
