"""Names under which clients have loaded adapters, by whichever API server.

Tests: tests/server/api/test_base_after_load.py
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ...memory.adapters.versions import versioned

if TYPE_CHECKING:
    from ..access.grants import Grant

MAX_NAMES = 1 << 12
"""Most names that are remembered; those loaded longest ago are forgotten."""

MAX_RIGHTS = 1 << 12


class LoadedNames:
    """The latest version that clients have loaded of each name, the latest load last. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._labels: dict[str, str] = {}
        self._latest: dict[tuple[str, ...] | None, str | None] = {}  # by a key's rights; emptied by each change

    def add(self, name: str, label: str) -> None:
        """A client has loaded a version. name: without the version."""
        with self._lock:
            self._labels.pop(name, None)
            self._labels[name] = label
            while len(self._labels) > MAX_NAMES:
                del self._labels[next(iter(self._labels))]
            self._latest.clear()

    def discard(self, name: str) -> None:
        """No version of a name is registered any longer."""
        with self._lock:
            if self._labels.pop(name, None) is not None:
                self._latest.clear()

    def latest(self, grant: Grant) -> str | None:
        """The latest loaded version that a key may use, as `name@version`; None if there is none."""
        with self._lock:
            if grant.adapters not in self._latest:
                if len(self._latest) >= MAX_RIGHTS:
                    self._latest.clear()
                found = (versioned(*one) for one in reversed(self._labels.items()))
                self._latest[grant.adapters] = next(filter(grant.allows, found), None)
            return self._latest[grant.adapters]
