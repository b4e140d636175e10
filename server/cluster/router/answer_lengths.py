"""Expected lengths of answers by adapter, from the answers that have ended."""

from __future__ import annotations

from collections import OrderedDict

from ....core.scheduling.output_lengths import OutputLengths

ENOUGH = 8
"""Answers of an adapter from which on its own mean counts, and not that of all."""

MAX_ADAPTERS = 1024
"""Adapters with remembered answers: the adapters with the latest ends."""


GUESS = 256.0
"""Tokens of an answer before any has ended, as the scheduler guesses."""


class AnswerLengths:
    """Mean length of an adapter's latest answers, of all answers where it has given few.

    An answer that its limit cut off counts with the tokens that it had: for so long it took its replica's time.
    """

    def __init__(self, guess: float = GUESS) -> None:
        """guess: tokens of an answer before any has ended; infinite where prompts are to count for nothing."""
        self._guess = guess
        self._all = OutputLengths()
        self._own: OrderedDict[str | None, OutputLengths] = OrderedDict()

    def end(self, adapter: str | None, num_tokens: int) -> None:
        """Record an answer that has ended. adapter: None is the base model."""
        own = self._own.setdefault(adapter, OutputLengths())
        self._own.move_to_end(adapter)
        if len(self._own) > MAX_ADAPTERS:
            self._own.popitem(last=False)
        for lengths in (own, self._all):
            lengths.end(num_tokens, was_cut=False)

    def expected(self, adapter: str | None) -> float:
        """Return the tokens that a new answer is expected to have."""
        own = self._own.get(adapter)
        lengths = self._all if own is None or len(own) < ENOUGH else own
        return lengths.mean if len(lengths) else self._guess
