"""The cost of one more token in a step, learned from the steps that run.

Tests: tests/core/speculation/test_token_cost.py.
"""

from __future__ import annotations

_KEPT = 0.98
"""Weight of all earlier steps together after another one, relative to before: the last 50 steps count most."""

_FEWEST = 8
"""Steps before anything is said."""

_MOST_SURPRISE = 4.0
"""A step that takes longer than this many times the expected seconds was disturbed, and counts as this long."""

_DOUBT = 0.05
"""Steps whose numbers of tokens differ by less than this share of their mean say little: the fit then leans towards
tokens that cost nothing, so that proposals are tried, and steps differ."""


class TokenCost:
    """Fits `seconds = fixed + each · tokens` to steps without prompts, apart for each power of two of sequences.

    Decode steps read all weights: where that takes the time, `each` is small, and verified tokens are nearly free.
    Where products take the time, a verified token costs as much as any other. One sequence may be in the first case
    while eight are in the second.
    """

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def note(self, num_sequences: int, tokens: int, seconds: float) -> None:
        """Learn from a step of so many decoding sequences and tokens."""
        self._lines.setdefault(_size(num_sequences), _Line()).note(tokens, seconds)

    def share(self, num_sequences: int) -> float:
        """Return the share of a step of so many decoding sequences that grows with its tokens; 0 while it is unknown.

        A proposed token raises the step's time by this share of its time per sequence. So it pays if it is accepted
        with a higher probability.
        """
        line = self._lines.get(_size(num_sequences))
        fitted = None if line is None else line.fitted()
        if fitted is None:
            return 0.0
        fixed, each = fitted
        growing = each * num_sequences
        return growing / (fixed + growing) if growing > 0 else 0.0


def _size(num_sequences: int) -> int:
    return (num_sequences - 1).bit_length()


class _Line:
    """Least squares with exponential weights."""

    def __init__(self) -> None:
        self._count = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._num_steps = 0

    def note(self, tokens: int, seconds: float) -> None:
        expected = self._expected(tokens)
        if expected is not None:
            seconds = min(seconds, _MOST_SURPRISE * expected)
        self._num_steps += 1
        self._count = _KEPT * self._count + 1
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + tokens * tokens
        self._products = _KEPT * self._products + tokens * seconds

    def fitted(self) -> tuple[float, float] | None:
        """Return the fixed seconds and those of each token, neither below 0; None after few steps."""
        if self._num_steps < _FEWEST:
            return None
        spread = self._count * self._squares - self._tokens * self._tokens + (_DOUBT * self._tokens) ** 2
        each = (self._count * self._products - self._tokens * self._seconds) / spread
        each = min(max(0.0, each), self._seconds / self._tokens)
        return (self._seconds - each * self._tokens) / self._count, each

    def _expected(self, tokens: int) -> float | None:
        fitted = self.fitted()
        return None if fitted is None else fitted[0] + fitted[1] * tokens
