"""A cache of encoded images' rows, in host memory's one budget.

Tests: tests/core/media/test_row_cache.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from ...memory.host.budget import HostBudget

RowsKey = tuple[str, str, str, str]
"""A tenant scope, a salt, an item's digest, and the adapter's part in the tower; the tower is one per encoder."""


class Rows(NamedTuple):
    """An image's rows. seconds: that encoding them took."""

    values: torch.Tensor
    seconds: float


class RowCache:
    """A cache of encoded images' rows. It competes with adapters' images and cached prefixes for host memory, by the
    seconds that an entry saves. Beyond `most_bytes` the least recently used entry leaves.

    `find` may be called by any thread, all else by the engine's.
    """

    def __init__(self, most_bytes: int, budget: HostBudget) -> None:
        """most_bytes: of all entries. Rows take long to encode and few bytes, so without this limit a flood of images
        would drop everybody's adapters.
        """
        self._most_bytes, self._budget = most_bytes, budget
        self._entries: OrderedDict[RowsKey, tuple[Rows, int]] = OrderedDict()  # with their uses; the latest use last
        self._num_bytes = 0
        budget.join(self)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, key: RowsKey) -> Rows | None:
        """Cached rows; None if there are none."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def note_use(self, key: RowsKey, rows: Rows) -> None:
        """Count a use of an image's rows, which enter the cache if there is room."""
        uses, num_bytes = 1, rows.values.nbytes
        if (found := self._entries.get(key)) is not None:
            rows, uses = found[0], found[1] + 1
        elif self._make_room(key, num_bytes, rows.seconds):
            self._num_bytes += num_bytes
        else:
            return
        self._entries[key] = rows, uses
        self._entries.move_to_end(key)
        self._budget.offer(self, key, num_bytes, rows.seconds, uses)

    def clear(self) -> int:
        """Drop all rows; return of how many images. Requests that hold rows keep them."""
        dropped = list(self._entries)
        for key in dropped:
            self._budget.withdraw(key)
            self.drop(key)
        return len(dropped)

    def _make_room(self, key: RowsKey, num_bytes: int, seconds: float) -> bool:
        if num_bytes > self._most_bytes:
            return False
        while self._num_bytes + num_bytes > self._most_bytes:
            oldest = next(iter(self._entries))
            self._budget.withdraw(oldest)
            self.drop(oldest)
        return self._budget.admit(self, key, num_bytes, seconds, 1)

    def is_loose(self, item: Hashable) -> bool:
        return True

    def drop(self, item: Hashable) -> None:
        rows, _ = self._entries.pop(item)  # pyright: ignore[reportArgumentType]
        self._num_bytes -= rows.values.nbytes
