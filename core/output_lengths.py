"""Expected lengths of answers, for which admission leaves room."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from .request import Request

_FIRST_GUESS = 256
_NUM_REMEMBERED = 128


class OutputLengths:
    """Lengths of the latest complete answers; a running one is expected to reach the mean of those that got as far.

    `max_tokens` alone says little: most answers end long before it.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._latest: deque[int] = deque(maxlen=_NUM_REMEMBERED)
        self._sorted: list[int] = []
        self._means: list[float] = []  # of the sorted lengths from each on
        self._is_new = False

    def end(self, num_tokens: int) -> None:
        """Record an answer that ended with `num_tokens` tokens, by itself or by its limit."""
        self._latest.append(num_tokens)
        self._is_new = True

    def _answer_length(self, drawn: int) -> int:
        """Return the expected length of an answer that has `drawn` tokens; a quarter more if none got so far."""
        if not self._latest:
            return max(_FIRST_GUESS, drawn + drawn // 4)
        if self._is_new:
            self._is_new = False
            self._sorted = sorted(self._latest)
            sums = list(accumulate(reversed(self._sorted)))
            self._means = [total / count for count, total in enumerate(sums, 1)][::-1]
        index = bisect_right(self._sorted, drawn)
        return int(self._means[index]) if index < len(self._means) else drawn + drawn // 4

    def final_length(self, request: Request) -> int:
        """Return the tokens, prompt included, that a request is expected to end with; the last one needs no KV."""
        prompt = request.num_prompt_tokens
        return min(request.max_length, prompt + self._answer_length(len(request.token_ids) - prompt) + 1)

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
