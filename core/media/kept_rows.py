"""Rows of encoded images for the next use of an image, in host memory's one budget.

Tests: tests/core/media/test_kept_rows.py
"""

from __future__ import annotations

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


class KeptRows:
    """Rows that no request has to hold. They compete with adapters' images and pages for host memory, by the seconds
    that they save; of those that have to go for the sake of `most_bytes`, the least recently used one is first.

    `find` may be called by any thread, all else by the engine's.
    """

    def __init__(self, most_bytes: int, budget: HostBudget) -> None:
        """most_bytes: of them in all. They are dear to make, and few by the byte: a flood of images would else drop
        everybody's adapters.
        """
        self._most_bytes, self._budget = most_bytes, budget
        self._kept: dict[RowsKey, tuple[Rows, int]] = {}  # with their uses; the least recently used ones first
        self._num_bytes = 0
        budget.join(self)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, key: RowsKey) -> Rows | None:
        """Rows that are kept."""
        kept = self._kept.get(key)
        return None if kept is None else kept[0]

    def note_use(self, key: RowsKey, rows: Rows) -> None:
        """Keep rows that a request has got, if there is room."""
        uses, num_bytes = 1, rows.values.nbytes
        if (kept := self._kept.pop(key, None)) is not None:
            rows, uses = kept[0], kept[1] + 1
        elif self._make_room(key, num_bytes, rows.seconds):
            self._num_bytes += num_bytes
        else:
            return
        self._kept[key] = rows, uses
        self._budget.offer(self, key, num_bytes, rows.seconds, uses)

    def _make_room(self, key: RowsKey, num_bytes: int, seconds: float) -> bool:
        if num_bytes > self._most_bytes:
            return False
        while self._num_bytes + num_bytes > self._most_bytes:
            oldest = next(iter(self._kept))
            self._budget.withdraw(oldest)
            self.drop(oldest)
        return self._budget.admit(self, key, num_bytes, seconds, 1)

    def is_loose(self, item: Hashable) -> bool:
        return True

    def drop(self, item: Hashable) -> None:
        rows, _ = self._kept.pop(item)  # pyright: ignore[reportArgumentType]
        self._num_bytes -= rows.values.nbytes
