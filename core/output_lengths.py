"""How far requests are expected to grow: what admission leaves room for."""

from __future__ import annotations

from collections.abc import Iterable

from .request import Request

_FIRST_GUESS = 256.0
_WEIGHT = 1 / 16


class OutputLengths:
    """The mean length of the answers that have ended, the latest ones counting most.

    A limit alone says little: most answers end long before the one that their clients set.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._mean = _FIRST_GUESS
        self._num_ended = 0

    def end(self, num_tokens: int) -> None:
        """An answer has ended of itself, with so many tokens."""
        self._num_ended += 1
        self._mean += max(_WEIGHT, 1 / (1 + self._num_ended)) * (num_tokens - self._mean)

    def final_length(self, request: Request) -> int:
        """Tokens, prompt included, that a request is expected to end with; its last one takes no room.

        One that is beyond the mean is expected to go on for a quarter of what it has drawn.
        """
        drawn = request.num_output_tokens
        return min(request.max_length, request.num_prompt_tokens + int(max(self._mean, 1.25 * drawn)) + 1)

    def growth(self, request: Request) -> int:
        """Pages that are still expected to be taken for a request."""
        block = self._block_tokens
        return max(0, -(-(self.final_length(request) - 1) // block) - -(-request.room // block))

    def growth_of(self, running: Iterable[Request]) -> int:
        """Pages that are still expected to be taken for all of `running`."""
        return sum(map(self.growth, running))
