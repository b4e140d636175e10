"""One host memory budget for adapters' images and swapped-out KV."""

from __future__ import annotations

from typing import Protocol


class Lodger(Protocol):
    """A user of host memory, some of whose data may be dropped at any time."""

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        ...

    def can_spare(self, num_bytes: int) -> bool:
        """True if at least `num_bytes` may be dropped."""
        ...

    def spare(self, num_bytes: int) -> None:
        """Drop the least recently used until `num_bytes` are freed, or no more may be dropped."""
        ...


class HostBudget:
    """Bytes of host memory shared by several lodgers. The first to join is evicted first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lodgers: list[Lodger] = []

    def join(self, lodger: Lodger) -> None:
        self._lodgers.append(lodger)

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return sum(lodger.num_bytes for lodger in self._lodgers)

    def excess(self, num_bytes: int) -> int:
        """Bytes to free before `num_bytes` more fit; zero or less if they fit."""
        return self.num_bytes + num_bytes - self.capacity_bytes

    def make_room(self, num_bytes: int) -> None:
        """Drop data until `num_bytes` more fit, as far as lodgers may drop any."""
        for lodger in self._lodgers:
            if (excess := self.excess(num_bytes)) <= 0:
                return
            lodger.spare(excess)

    def claim(self, num_bytes: int, lodger: Lodger) -> bool:
        """Make room at the expense of a lodger other than `lodger`; return False, and drop nothing, if none has
        enough.
        """
        if (excess := self.excess(num_bytes)) <= 0:
            return True
        for other in self._lodgers:
            if other is not lodger and other.can_spare(excess):
                other.spare(excess)
                return True
        return False
