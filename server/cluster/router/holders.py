"""An index of the adapters that replicas hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Holders:
    """Names of the replicas that hold each adapter, kept up to date one change at a time."""

    def __init__(self) -> None:
        self._replicas: dict[str, list[str]] = {}

    def of(self, adapter: str) -> Sequence[str]:
        """Return the replicas that hold an adapter, in no order."""
        return self._replicas.get(adapter, ())

    def add(self, replica: str, adapters: Iterable[str]) -> None:
        """A replica holds these, which it did not."""
        for adapter in adapters:
            self._replicas.setdefault(adapter, []).append(replica)

    def remove(self, replica: str, adapters: Iterable[str]) -> None:
        """A replica holds these no more."""
        for adapter in adapters:
            left = self._replicas[adapter]
            left.remove(replica)
            if not left:
                del self._replicas[adapter]
