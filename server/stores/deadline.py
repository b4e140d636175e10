"""The time that a download may take."""

from __future__ import annotations

import time

from .errors import StoreAway

SILENT_SECONDS = 10.0
"""Longest pause of a store between two parts of an answer, and longest wait for a connection."""


class Deadline:
    """A moment by which a download has to end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self, timeout: float | None = None) -> float:
        """Seconds left, `timeout` at most. Raises StoreAway when there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise StoreAway(f"its store took longer than {self._seconds:g} seconds (adapter_source_seconds)")
        return min(left, SILENT_SECONDS if timeout is None else timeout)
