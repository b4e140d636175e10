"""Expected lengths of answers, for which admission leaves room."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from ..requests.request import Request

_FIRST_GUESS = 256
_NUM_REMEMBERED = 128


class OutputLengths:
    """Lengths of the latest answers, from which the length of a running one is estimated.

    It is expected to draw as many more tokens as those that got as far drew from there on, for each of them that ended
    of itself.

    A limit alone says little: most answers end long before the one that their clients set. An answer that its limit cut
    off says as little: it would have gone on. Where all were cut off, the limit is what is left to expect.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._latest: deque[tuple[int, int]] = deque(maxlen=_NUM_REMEMBERED)  # lengths, and 1 if it ended of itself
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of the sorted lengths from each on
        self._ends: list[int] = []  # how many of these ended of themselves
        self._is_new = False

    def end(self, num_tokens: int, was_cut: bool) -> None:
        """Record an answer that ended with so many tokens, of itself or, if `was_cut`, at its limit."""
        self._latest.append((num_tokens, int(not was_cut)))
        self._is_new = True

    def _answer_length(self, drawn: int) -> float:
        """Return the expected length of an answer that has `drawn` tokens; a quarter more where none got so far."""
        if self._is_new:
            self._is_new = False
            latest = sorted(self._latest)
            self._sorted = [length for length, _ in latest]
            self._sums = list(accumulate(reversed(self._sorted)))[::-1]
            self._ends = list(accumulate([ended for _, ended in reversed(latest)]))[::-1]
        index = bisect_right(self._sorted, drawn)
        count = len(self._sorted) - index
        if not count:
            return max(drawn + drawn // 4, 0 if any(self._ends[:1]) else _FIRST_GUESS)
        if not self._ends[index]:
            return math.inf
        return drawn + (self._sums[index] - count * drawn) // self._ends[index]

    def final_length(self, request: Request) -> int:
        """Return the tokens, prompt included, that a request is expected to end with; the last one needs no KV."""
        prompt = request.num_prompt_tokens
        length = prompt + self._answer_length(len(request.token_ids) - prompt) + 1
        return int(length) if length < request.max_length else request.max_length

    def growth(self, request: Request) -> int:
        """Return the pages that a request is expected to grow by."""
        block = self._block_tokens
        return max(0, -(-(self.final_length(request) - 1) // block) - -(-request.room // block))

    def growth_of(self, running: Iterable[Request]) -> int:
        """Return the pages that `running` is expected to grow by in all."""
        return sum(map(self.growth, running))

    def peak_growth(self, running: Iterable[Request], request: Request) -> int:
        """Return the most pages, beyond today's, that `running` and `request` will need at any time.

        Less than they grow by in all: a request that ends frees its pages while others go on growing. Pages that it
        shares with the prefix cache are not freed. `request` counts as having pages for its known tokens.
        """
        block = self._block_tokens
        known = -(-request.num_tokens // block)
        taken, ahead = known, [(self.final_length(request) - 1 - request.num_tokens, known)]
        for each in running:
            count, shared = len(each.token_ids), each.began_at // block
            taken += each.room // block - shared
            ahead.append((self.final_length(each) - 1 - count, -(-max(each.room, count) // block) - shared))
        ahead.sort(reverse=True)
        peak = pages = 0
        for alive, (steps, held) in enumerate(ahead, 1):  # when this one ends, those before it still run
            pages += held
            peak = max(peak, pages * block + alive * steps)
        return max(0, -(-peak // block) - taken)
