"""How many tokens to propose for a sequence.

Tests: tests/core/requests/test_draft_length.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import EngineConfig

MOST_DRAFTS = 8
"""The most tokens proposed for a sequence in a step."""

MOST_DRAFTED = 128
"""Tokens with logits from which on a step gets no drafts: with so many, products take a good part of the time on any
device. It bounds the memory for logits and the number of captured sizes."""

LONGEST_PAUSE = 64
"""The most steps without a proposal, after which one token is tried."""

_FIRST = 2
_KEPT = 0.9
"""Weight of a request's earlier proposals after another one."""

_KEPT_OF_ALL = 0.99
"""The same of all requests' proposals."""

_PRIOR = 1.0
"""Weight of the prior, in tokens."""


def most_logits(config: EngineConfig) -> int:
    """The most tokens of a step that have logits: one of each sequence, and drafts."""
    rows = config.max_num_seqs
    if config.speculates:
        rows = max(rows, min(rows * (1 + MOST_DRAFTS), MOST_DRAFTED))
    return min(rows, config.max_num_batched_tokens)


class Chance:
    """Estimates the probability that a proposed token is accepted after those before it were.

    The latest proposals weigh most.
    """

    __slots__ = ("_accepted", "_kept", "_prior", "_tried")

    def __init__(self, prior: float = 0.5, kept: float = _KEPT_OF_ALL) -> None:
        """prior: acceptance assumed at first. kept: each proposal multiplies the weight of earlier ones by it."""
        self._prior, self._kept = prior, kept
        self._accepted = self._tried = 0.0  # tokens up to the first rejected one

    @property
    def value(self) -> float:
        return (self._accepted + self._prior * _PRIOR) / (self._tried + _PRIOR)

    def note(self, proposed: int, accepted: int) -> None:
        """Learn from a verified proposal."""
        self._accepted = self._kept * self._accepted + accepted
        self._tried = self._kept * self._tried + accepted + (accepted < proposed)


class DraftLength:
    """Adapts the length of a sequence's proposals to the accepted tokens, and to the cost of a proposed token.

    The length becomes twice that of a proposal that was accepted whole, otherwise one more than the accepted tokens.
    Token j of a proposal is expected to be accepted with probability p^j, where p is estimated from the sequence's
    latest proposals, at first from those of others; tokens below the cost are left out. After a proposal without an
    accepted token, and where not even the first token is worth its cost, steps without a proposal follow: 1, then 2,
    4, … up to `LONGEST_PAUSE`.
    """

    __slots__ = ("_chance", "_length", "_num_paused", "_pause")

    def __init__(self, prior: float = 0.5, first: int = _FIRST) -> None:
        """prior: probability that is assumed at first. first: length of the first proposal."""
        self._chance = Chance(prior, _KEPT)
        self._length = first
        self._pause = 0  # steps without a proposal, the last time
        self._num_paused = 0  # steps of these that are left

    @property
    def chance(self) -> float:
        """Estimated probability that a token is accepted after those before it were."""
        return self._chance.value

    def take(self, cost: float = 0.0) -> int:
        """Return the most tokens to propose for the next step; 0: none.

        cost: the least probability of being accepted with which a proposed token pays (`TokenCost.share`).
        """
        if self._num_paused:
            self._num_paused -= 1
            return 0
        chance = expected = self.chance
        count = 0
        while count < self._length and expected >= cost:
            count += 1
            expected *= chance
        if not count and self._pause < LONGEST_PAUSE:
            self._wait()
            return 0
        return max(1, count)

    def note(self, proposed: int, accepted: int) -> None:
        """Learn from a verified proposal."""
        self._chance.note(proposed, accepted)
        if accepted:
            self._pause = 0
            longer = max(self._length, 2 * proposed)
            self._length = min(MOST_DRAFTS, longer if accepted == proposed else accepted + 1)
        else:
            self._length = 1
            self._wait()

    def _wait(self) -> None:
        self._pause = self._num_paused = min(LONGEST_PAUSE, max(1, 2 * self._pause))
