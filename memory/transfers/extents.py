"""Free units of a chunk of memory."""

from __future__ import annotations

from bisect import bisect


class Extents:
    """Free runs of a chunk of `size` units. Neighbours merge; a request takes the smallest run that fits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]  # (first, length), by first

    def take(self, count: int) -> int | None:
        """The first of `count` consecutive units, now taken; None when no free run is as long."""
        fits = [(length, first) for first, length in self._free if length >= count]
        if not fits:
            return None
        length, first = min(fits)
        index = self._free.index((first, length))
        self._free[index : index + 1] = [(first + count, length - count)] if length > count else []
        return first

    def give(self, first: int, count: int) -> None:
        """Give back what `take(count)` gave."""
        index = bisect(self._free, (first, 0))
        if index < len(self._free) and first + count == self._free[index][0]:
            count += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == first:
            before = self._free.pop(index - 1)
            first, count = before[0], before[1] + count
            index -= 1
        self._free.insert(index, (first, count))

    @property
    def is_free(self) -> bool:
        """True if every unit is free."""
        return self._free == [(0, self.size)]
