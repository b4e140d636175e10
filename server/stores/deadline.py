"""The deadline of a download."""

from __future__ import annotations

import time

from .errors import StoreAway

SILENT_SECONDS = 10.0
"""Longest pause of a store between two parts of a response, and longest wait for a connection."""


class Deadline:
    """The time by which a download must end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self, timeout: float | None = None) -> float:
        """Seconds left, at most `timeout`. Raises StoreAway if none are left."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise StoreAway(f"its store took longer than {self._seconds:g} seconds (adapter_source_seconds)")
        return min(left, SILENT_SECONDS if timeout is None else timeout)
