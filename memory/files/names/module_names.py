"""The module names that an adapter's patterns are matched with, in one text, so that one pass matches all of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

_MAX_RUNS = 64  # kept: files of one model mostly repeat the same few kinds of characters


class ModuleNames:
    """Module names one after another. A set of positions between their characters is one number, with a bit for each
    position.

    starts, ends: the positions before each name's first and after its last character. After a name's end follows a
    position that no character leads to, so no match can continue from one name into the next.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.text = "\n".join(names) + "\n"
        self.longest = max(map(len, names), default=0)
        self._end_of: dict[str, int] = {}
        self._name_at: dict[int, str] = {}
        self._tails: dict[int, dict[str, list[str]]] = {}
        starts, position = [], 0
        for name in names:
            starts.append(position)
            position += len(name)
            self._end_of[name], self._name_at[position] = position, name
            position += 1
        self.starts = _number(starts, position)
        self.ends = _number(self._name_at, position)
        self.everywhere = (1 << position) - 1
        positions: dict[str, list[int]] = defaultdict(list)
        for at, character in enumerate(self.text):
            positions[character].append(at)
        self._characters = {each: _number(found, position) for each, found in positions.items() if each != "\n"}
        self.after_dots = self.character(".") << 1
        word = self.where(re.compile(r"\w").match)
        self.word_boundaries = word ^ (word << 1 & self.everywhere)
        self._runs: dict[int, tuple[int, ...]] = {}

    def character(self, character: str) -> int:
        """The positions just before each `character`."""
        return self._characters.get(character, 0)

    def where(self, is_taken: Callable[[str], object]) -> int:
        """The positions just before a character that `is_taken` accepts."""
        found = 0
        for character, positions in self._characters.items():
            if is_taken(character):
                found |= positions
        return found

    def runs(self, characters: int) -> tuple[int, ...]:
        """The positions before runs of 1, 2, 4, … of some characters. characters: the positions before these."""
        if characters not in self._runs:
            found, run, count = [], characters, 1
            while run:
                found.append(run)
                run &= run >> count
                count *= 2
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            self._runs[characters] = tuple(found)
        return self._runs[characters]

    def ends_of(self, names: Iterable[str]) -> int:
        """The ends of some of the names."""
        return _number([self._end_of[name] for name in names], len(self.text))

    def with_tail(self, tail: str) -> Sequence[str]:
        """The names that equal `tail`, or end with it after a dot."""
        count = tail.count(".") + 1
        if count not in self._tails:
            self._tails[count] = self._by_tail(count)
        return self._tails[count].get(tail, ())

    def _by_tail(self, count: int) -> dict[str, list[str]]:
        """The names by their last `count` parts."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.names:
            parts = name.rsplit(".", count)
            if len(parts) >= count:
                found[".".join(parts[-count:])].append(name)
        return found

    def at(self, ends: int) -> list[str]:
        """The names that end in a set of positions, in order."""
        bits = f"{ends:b}"[::-1]
        return [name for position, name in self._name_at.items() if bits[position : position + 1] == "1"]


def _number(positions: Iterable[int], size: int) -> int:
    """The number with the bits `positions`, all below `size`."""
    bits = bytearray(b"0") * size
    for position in positions:
        bits[size - 1 - position] = ord("1")
    return int(bits, 2) if size else 0
