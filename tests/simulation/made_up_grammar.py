"""Grammars over the made-up model's tokens, with the parts of `Grammars` and of llguidance's matcher that are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammar_work import GrammarState
from chorus.core.requests.grammars import Grammars
from chorus.core.requests.types import ScheduledSequence

from .asked import promise

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST_FORCED = 5


def made_up(number: int, vocab: int) -> Grammar:
    """A grammar whose answers repeat `number` tokens that are forced, then some of which about half are allowed."""
    return Grammar("regex", f"{number} of {vocab}")


def allowed(grammar: Grammar, answer: Sequence[int]) -> list[int]:
    """The tokens that may follow an answer; one where it is forced. An answer may end with any of them."""
    forced, vocab = (int(part) for part in grammar.text.split(" of "))
    place, last = len(answer) % (forced + 2), sum(answer[-1:])
    if place < forced:
        return [(7 * forced + 3 * place) % vocab]
    return [token for token in range(vocab) if (token + last + place) % 2]


class MadeUpMatcher:
    """Where an answer is in its grammar; it must never be given a token that is not allowed."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._answer = grammar, list[int]()

    def is_error(self) -> bool:
        return False

    def consume_tokens(self, tokens: Sequence[int]) -> None:
        promise(self.validate_tokens(tokens) == len(tokens), "an answer's tokens {} violate its grammar", tokens)
        self._answer += tokens

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens are allowed one after the other."""
        answer = [*self._answer]
        for count, token in enumerate(tokens):
            if token not in allowed(self._grammar, answer):
                return count
            answer.append(token)
        return len(tokens)

    def compute_ff_tokens(self) -> list[int]:
        """Return tokens of the only text that may come next."""
        answer = [*self._answer]
        while len(answer) < len(self._answer) + LONGEST_FORCED and len(may := allowed(self._grammar, answer)) == 1:
            answer += may
        return answer[len(self._answer) :]


class MadeUpGrammars:
    """What requests and proposals need of `Grammars`."""

    def compile(self, grammar: Grammar) -> MadeUpMatcher:
        return MadeUpMatcher(grammar)

    def forced(self, matcher: MadeUpMatcher) -> list[int]:
        return matcher.compute_ff_tokens()

    def known(self, tokens: list[int]) -> list[int]:
        return tokens


def made_up_grammars() -> Grammars:
    return cast(Grammars, MadeUpGrammars())


def sees(row: ScheduledSequence) -> None:
    """Do what sampling a token does to a request's state in its grammar."""
    grammar, state = row.params.grammar, row.state
    if grammar is None:
        return
    if state.grammar is None:
        state.grammar = GrammarState(cast("LLMatcher", MadeUpMatcher(grammar)), row.num_prompt_tokens)
    state.grammar.see(row.token_ids)
