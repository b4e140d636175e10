"""How many tokens to propose for a sequence.

Tests: tests/core/requests/test_draft_length.py.
"""

from __future__ import annotations

MOST_DRAFTS = 8
"""The most tokens proposed for a sequence in a step."""

_FIRST = 2
_LONGEST_PAUSE = 64


def most_logits(max_num_seqs: int) -> int:
    """The most tokens of a step that have logits."""
    return max_num_seqs * (1 + MOST_DRAFTS)


class DraftLength:
    """Adapts the length of a sequence's proposals to the number of tokens that were accepted.

    The length doubles when a whole proposal was accepted, and otherwise becomes one more than what was accepted. After
    a proposal without an accepted token, steps without one follow: 1, then 2, 4, … until a token is accepted again. So
    a sequence whose proposals are always wrong computes at most one wasted token in `_LONGEST_PAUSE` steps.
    """

    __slots__ = ("_length", "_num_paused", "_pause")

    def __init__(self) -> None:
        self._length = _FIRST
        self._pause = 0  # steps without a proposal, after the last rejection
        self._num_paused = 0  # steps of these that are left

    def take(self) -> int:
        """Return the most tokens to propose for the next step; 0: none."""
        if self._num_paused:
            self._num_paused -= 1
            return 0
        return self._length

    def note(self, proposed: int, accepted: int) -> None:
        """Learn from a verified proposal."""
        if accepted:
            self._pause = 0
            self._length = min(MOST_DRAFTS, 2 * self._length if accepted == proposed else accepted + 1)
        else:
            self._length = 1
            self._pause = self._num_paused = min(_LONGEST_PAUSE, max(1, 2 * self._pause))
