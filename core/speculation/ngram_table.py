"""Where the n-grams of a text were last seen.

Tests: tests/core/speculation/test_ngrams.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

LENGTHS = (4, 2)
"""Lengths of the n-grams that are looked up, longest first."""

MOST_SLOTS = 1 << 13
"""The most slots of a table. A new n-gram replaces the one that has its slot."""

BREAK = -1
"""Stands between two texts in one list: no token, so no n-gram with it is ever looked up."""

_FEWEST_SLOTS = 64


class NgramTable:
    """Finds the n-grams of a growing list of tokens. It takes constant time per token, on average.

    Memory: two tables of 4-byte positions with at most `MOST_SLOTS` slots each, and at most two slots per token above
    the smallest size.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """tokens: their owner appends to them."""
        self.tokens = tokens
        self.tables = _tables(_FEWEST_SLOTS)
        """For each of `LENGTHS`: by hash of an n-gram, the position after its last occurrence; 0: none."""
        self._num_inserted = 0
        """N-grams that end before this position are in the tables."""

    def insert(self, end: int) -> None:
        """Insert the n-grams that end before position `end`: a token is known to follow each."""
        slots = len(self.tables[0])
        if slots < end and slots < MOST_SLOTS:
            while slots < end and slots < MOST_SLOTS:
                slots *= 2
            self.tables, self._num_inserted = _tables(slots), 0
        tokens, mask, begin = self.tokens, slots - 1, self._num_inserted
        for length, table in zip(LENGTHS, self.tables, strict=True):
            for stop in range(max(length, begin), end):
                table[hash(tuple(tokens[stop - length : stop])) & mask] = stop
        self._num_inserted = max(begin, end)

    def find(self, gram: list[int]) -> int:
        """Return the position after the last occurrence of an n-gram of one of `LENGTHS`; 0: none is known."""
        table, length = self.tables[LENGTHS.index(len(gram))], len(gram)
        at = table[hash(tuple(gram)) & len(table) - 1]
        return at if at and list(self.tokens[at - length : at]) == gram else 0


def _tables(slots: int) -> list[array[int]]:
    return [array("i", bytes(4 * slots)) for _ in LENGTHS]
