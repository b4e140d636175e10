"""N-gram proposals: the tokens that followed the last ones when they occurred before.

A request's texts are its prompt and answer, the prediction of its answer, and recent answers of its adapter. Source:
prompt lookup decoding (Saxena 2023).

Tests: tests/core/speculation/test_ngrams.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import takewhile

from ..requests.request import Request
from .answer_cache import AnswerCache
from .ngram_table import BREAK, LENGTHS, NgramTable


class NgramProposer:
    """Proposes the tokens that followed the longest match of a request's last tokens, found by n-grams of `LENGTHS`.

    It takes constant time per token. Memory per request: a table of its prompt and answer, and one of its prediction.
    """

    def __init__(self, answers: AnswerCache | None = None) -> None:
        """answers: recent answers, if they are texts to look in."""
        self._answers = answers

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        found = {}
        for request, count in wanted.items():
            index = request.proposing
            if not isinstance(index, NgramIndex):
                index = request.proposing = NgramIndex(request.token_ids, request.num_prompt_tokens, request.prediction)
            answers = () if self._answers is None else self._answers.tables(request)
            if proposal := index.propose(count, answers):
                found[request] = proposal
        return found


class NgramIndex:
    """The texts of a request, and the place in them that its answer follows now."""

    def __init__(self, tokens: list[int], num_prompt_tokens: int = 0, prediction: Sequence[int] = ()) -> None:
        """tokens: the prompt and the answer; their owner appends to them. prediction: of the answer.

        The answer is first expected to begin as its prediction does.
        """
        self.tokens = tokens
        self.own = NgramTable(tokens)
        self._predicted: tuple[NgramTable, ...] = ()
        self._match: tuple[NgramTable, int] | None = None
        """A text, and the position in it after the match of the first `_num_seen` tokens."""
        self._num_seen = num_prompt_tokens
        if prediction:
            predicted = NgramTable(array("i", prediction))
            predicted.insert(len(prediction))
            self._predicted = (predicted,)
            self._match = predicted, 0

    def propose(self, count: int, answers: Sequence[NgramTable] = ()) -> list[int]:
        """Return the tokens that followed the match of the last tokens, at most `count`; none without a match.

        answers: other texts to look in, the most relevant first. Of matches of the same length, the one in the
        prediction counts, then the one in the request's own tokens.
        """
        end = len(self.tokens)
        match = self._follow(end)
        self.own.insert(end)
        proposal = [] if match is None else self._after(*match, count)
        if not proposal:
            match = self._look_up(end, (*self._predicted, self.own, *answers))
            proposal = [] if match is None else self._after(*match, count)
        self._match, self._num_seen = match, end
        return proposal

    def _follow(self, end: int) -> tuple[NgramTable, int] | None:
        """Return where the last match goes on if the tokens since continue it; else None."""
        if self._match is None:
            return None
        table, at = self._match
        since = self.tokens[self._num_seen : end]
        return (table, at + len(since)) if list(table.tokens[at : at + len(since)]) == since else None

    def _look_up(self, end: int, tables: Sequence[NgramTable]) -> tuple[NgramTable, int] | None:
        """Return the place after the last earlier occurrence of the longest n-gram that ends at `end`."""
        for length in LENGTHS:
            if length > end:
                continue
            gram = self.tokens[end - length : end]
            for table in tables:
                if at := table.find(gram):
                    return table, at
        return None

    def _after(self, table: NgramTable, at: int, count: int) -> list[int]:
        """Return the tokens from a place on.

        Own tokens go round if the match overlaps the last tokens: after `a b a b` they are `a b a b …`.
        """
        found = list(takewhile(BREAK.__ne__, table.tokens[at : at + count]))
        if table is self.own:
            found = [found[index % len(found)] for index in range(count)]
        return found
