"""Replicas that a request may go to, as a policy sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .holders import Holders
from .rendezvous import key_of, weights
from .replica_state import ReplicaState

NUM_HOMES = 2
"""Replicas that an adapter's requests go to by hash."""

_MAX_HOMES = 1 << 16


class Replicas(list[ReplicaState]):
    """States of replicas in the order of their indices, which of them hold an adapter, and its homes.

    Membership doesn't change; states do. Their names differ from each other.
    """

    def __init__(self, states: Iterable[ReplicaState], holders: Holders | None = None) -> None:
        """holders: an index of what they hold, of further replicas, too; without one all of them are asked."""
        super().__init__(states)
        self._holders = holders
        self._places = {state.name: index for index, state in enumerate(self)}
        self._keys = [key_of(name) for name in self._places]
        self._homes: dict[str, tuple[int, ...]] = {}

    def holders(self, adapter: str) -> Sequence[str]:
        """Return the names of the replicas that hold an adapter, and maybe of some that are not in this list."""
        if self._holders is not None:
            return self._holders.of(adapter)
        return [state.name for state in self if adapter in state.on_host or adapter in state.resident]

    def find(self, name: str) -> int | None:
        """Return the index of a replica; None if it is not among these."""
        return self._places.get(name)

    def homes(self, adapter: str) -> tuple[int, ...]:
        """Return the `NUM_HOMES` replicas of the highest rendezvous weights for an adapter, the highest first."""
        homes = self._homes.get(adapter)
        if homes is None:
            found = weights(adapter, self._keys)
            homes = tuple(map(found.index, sorted(found)[: -NUM_HOMES - 1 : -1]))
            if len(self._homes) == _MAX_HOMES:
                self._homes.clear()
            self._homes[adapter] = homes
        return homes
