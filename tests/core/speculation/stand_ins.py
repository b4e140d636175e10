"""Proposers that stand in for n-grams: always right, always wrong, or drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.speculation.ngrams import NgramProposer

Answer = Callable[[Request], Sequence[int]]
"""All tokens that a request generates."""


class Free:
    """A cost of steps in which tokens cost nothing, so that draft lengths don't depend on times."""

    def note(self, num_sequences: int, tokens: int, seconds: float) -> None:
        """Nothing is learned."""

    def share(self, num_sequences: int) -> float:
        return 0.0


class Right:
    """Proposes the tokens that will be generated, and goes on after them with tokens that won't."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {request: self.of(request, count) for request, count in wanted.items()}

    def of(self, request: Request, count: int) -> list[int]:
        done = request.num_output_tokens
        return ([*self.answer(request)[done:], *request.token_ids] * (1 + count))[:count]


class Wrong(Right):
    """Proposes any other token than the one that will be generated."""

    def of(self, request: Request, count: int) -> list[int]:
        return [token - 1 if token else 1 for token in super().of(request, count)]


class Drawn(Right):
    """Proposes by n-grams, right and wrong tokens, or random ones, of any number, to some of the requests."""

    def __init__(self, answer: Answer, rng: random.Random) -> None:
        super().__init__(answer)
        self._rng = rng
        self.ngrams = NgramProposer()

    def use(self, engine: Engine) -> None:
        """Propose from the engine's recent answers, too."""
        self.ngrams = NgramProposer(engine.answers)

    def predict(self, vocab: int) -> list[int]:
        """A prediction for a request: mostly none."""
        rng = self._rng
        return [rng.randrange(2, vocab) for _ in range(rng.choice([0, 0, 0, 4, 30]))]

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        rng = self._rng
        found = {request: list(tokens) for request, tokens in self.ngrams.propose(wanted).items()}
        for request, count in wanted.items():
            kind = rng.randrange(4)
            if kind == 0:
                right = self.of(request, count)
                cut = rng.randrange(count + 1)
                found[request] = right[:cut] + [rng.choice(request.token_ids) for _ in right[cut:]]
            elif kind == 1:
                found[request] = [rng.choice(request.token_ids) for _ in range(rng.randint(1, count + 3))]
            elif kind == 2:
                found.pop(request, None)
        return found
