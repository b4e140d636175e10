"""Counts one process's error responses, and its refusals for lack of capacity or rights."""

from __future__ import annotations

from dataclasses import dataclass

TOO_MANY = 429


@dataclass(slots=True)
class Statuses:
    """Counters, updated when a response begins, on the event loop."""

    errors: int = 0
    """Of the server, and of adapters' files (424)."""
    refused: int = 0

    def note(self, status: int) -> None:
        if status == TOO_MANY:
            self.refused += 1
        elif status >= 500 or status == 424:
            self.errors += 1
