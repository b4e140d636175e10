"""Warnings that strangers or a fault could cause any number of times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class RareLog:
    """Logs at most one warning every so many seconds, with the number of warnings left out since the last."""

    def __init__(self, log: logging.Logger, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._seconds, self._clock = log, seconds, clock
        self._next = float("-inf")
        self._left_out = 0

    def warning(self, message: str, *args: object) -> None:
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return
        self._next = now + self._seconds
        if self._left_out:
            message, args = message + "; %d more since the last such line", (*args, self._left_out)
        self._left_out = 0
        self._log.warning(message, *args)
