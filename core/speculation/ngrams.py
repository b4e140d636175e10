"""N-gram proposals: what followed the last tokens when they occurred before, in the prompt or in the answer.

Source: prompt lookup decoding (Saxena 2023).

Tests: tests/core/speculation/test_ngrams.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..requests.request import Request

LENGTHS = (4, 2)
"""Lengths of the n-grams that are looked up, longest first."""

MOST_SLOTS = 1 << 13
"""The most slots of a table. A new n-gram replaces the one that has its slot."""

_FEWEST_SLOTS = 64


class NgramProposer:
    """Proposes what followed the longest match of a request's last tokens, found by the last n-grams of `LENGTHS`.

    It takes constant time per token. Memory per request: two tables of at most `MOST_SLOTS` 4-byte positions.
    """

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        found = {}
        for request, count in wanted.items():
            index = request.proposing
            if not isinstance(index, NgramIndex):
                index = request.proposing = NgramIndex(request.token_ids, request.max_length)
            if proposal := index.propose(count):
                found[request] = proposal
        return found


@dataclass(slots=True)
class NgramIndex:
    """Where the n-grams of a growing list of tokens were last seen."""

    tokens: list[int]
    """The request's; its owner appends to it."""
    most_tokens: int
    """Tokens that it can get."""
    tables: list[array[int]] = field(init=False, repr=False)
    """For each of `LENGTHS`: by hash of an n-gram, the position after its last occurrence; 0: none."""
    _mask: int = field(init=False)
    _num_indexed: int = 0
    """N-grams that end before this position are in the tables."""
    _distance: int = 0
    """From the position after the last tokens back to the one after their match; 0: there is none."""

    def __post_init__(self) -> None:
        slots = _FEWEST_SLOTS
        while slots < min(self.most_tokens, MOST_SLOTS):
            slots *= 2
        self._mask = slots - 1
        self.tables = [array("i", bytes(4 * slots)) for _ in LENGTHS]

    def propose(self, count: int) -> list[int]:
        """Return the tokens that followed the match of the last tokens, at most `count`; none without a match.

        They go round if the match overlaps the last tokens: after `a b a b` they are `a b a b …`.
        """
        tokens, end = self.tokens, len(self.tokens)
        distance = self._follow(end)
        self._insert(end)
        if not distance:
            distance = self._look_up(end)
        self._distance = distance
        if not distance:
            return []
        proposal: list[int] = []
        for position in range(end, end + count):
            before = position - distance
            proposal.append(tokens[before] if before < end else proposal[before - end])
        return proposal

    def _follow(self, end: int) -> int:
        """Return the last match's distance if the tokens since continue it; else 0."""
        tokens, distance = self.tokens, self._distance
        if not distance:
            return 0
        begin = self._num_indexed  # the length at the last call
        return distance if tokens[begin:end] == tokens[begin - distance : end - distance] else 0

    def _look_up(self, end: int) -> int:
        """Return the distance to the last earlier occurrence of the longest n-gram that ends at `end`; 0: none."""
        tokens = self.tokens
        for length, table in zip(LENGTHS, self.tables, strict=True):
            if length >= end:
                continue
            gram = tokens[end - length : end]
            at = table[hash(tuple(gram)) & self._mask]
            if at and tokens[at - length : at] == gram:
                return end - at
        return 0

    def _insert(self, end: int) -> None:
        """Insert the n-grams that end before `end`."""
        tokens, mask = self.tokens, self._mask
        for length, table in zip(LENGTHS, self.tables, strict=True):
            for stop in range(max(length, self._num_indexed), end):
                table[hash(tuple(tokens[stop - length : stop])) & mask] = stop
        self._num_indexed = end
