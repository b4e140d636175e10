"""Rows of encoded images for the next use of an image, in host memory's one budget.

Tests: tests/core/media/test_kept_rows.py
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ...memory.host.budget import HostBudget

RowsKey = tuple[str, str, str, str]
"""A tenant scope, a salt, an item's digest, and the adapter's part in the tower; the tower is one per encoder."""


@dataclass(slots=True)
class _Kept:
    rows: torch.Tensor
    seconds: float
    uses: int = 1


class KeptRows:
    """Rows that no request needs to hold. They compete with adapters' images and pages for host memory, by the seconds
    that they save; of those that have to go for the sake of `most_bytes`, the least recently used one is first.

    `find` may be called by any thread, all else by the engine's.
    """

    def __init__(self, most_bytes: int, budget: HostBudget) -> None:
        """most_bytes: of them in all. They are dear to make, and few by the byte: a flood of images would else drop
        everybody's adapters.
        """
        self._most_bytes, self._budget = most_bytes, budget
        self._kept: dict[RowsKey, _Kept] = {}  # the least recently used ones first
        self._num_bytes = 0
        budget.join(self)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, key: RowsKey) -> torch.Tensor | None:
        """Rows that are kept."""
        kept = self._kept.get(key)
        return None if kept is None else kept.rows

    def note_use(self, key: RowsKey, rows: torch.Tensor, seconds: float | None) -> None:
        """Keep rows that a request has got, if there is room. seconds: that they took; None: they were there."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.uses += 1
        elif seconds is None or not self._make_room(key, rows.nbytes, seconds):
            return
        else:
            kept = _Kept(rows, seconds)
            self._num_bytes += rows.nbytes
        self._kept[key] = kept
        self._budget.offer(self, key, rows.nbytes, kept.seconds, kept.uses)

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
        gone = self._kept.pop(item)  # pyright: ignore[reportArgumentType]
        self._num_bytes -= gone.rows.nbytes
