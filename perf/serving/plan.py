"""What is to be sent, and when: a workload's requests with the prompts and models that a server has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...server.demo.questions import Question
from .answers import questions
from .prompts import Prompts


class PlanError(ValueError):
    """A workload that this server can't be asked; the message says what to change."""


class Wanted(Protocol):
    """A request of a workload: when, which adapter (None: the base model), and how many tokens."""

    @property
    def arrival(self) -> float: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def hash_ids(self) -> Sequence[int]: ...
    @property
    def hash_block_tokens(self) -> int: ...


@dataclass(slots=True)
class PlannedRequest:
    """One request. at: seconds since the load began. extra: fields of the body. question: where the answer is known."""

    at: float
    model: str
    prompt: str | list[int]
    max_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)
    question: Question | None = None


class Names:
    """Which served model stands for a workload's adapter: the one of that name, else the next in turn.

    Raises PlanError for adapters if none is served.
    """

    def __init__(self, base: str, adapters: Sequence[str]) -> None:
        self._base = base
        self._adapters = list(adapters)
        self._known = {name: name for name in adapters}
        self.substituted = 0

    def of(self, adapter: str | None) -> str:
        if adapter is None:
            return self._base
        if adapter not in self._known:
            if not self._adapters:
                raise PlanError(
                    f"the workload asks for the adapter {adapter} but no adapter is to be used; serve some, or name "
                    "them with --adapters"
                )
            self._known[adapter] = self._adapters[self.substituted % len(self._adapters)]
            self.substituted += 1
        return self._known[adapter]


def with_prompts(
    wanted: Iterable[Wanted], names: Names, prompts: Prompts, *, max_model_len: int | None, plain: bool
) -> tuple[list[PlannedRequest], int]:
    """A plan of the workload's lengths, and how many requests were shortened to fit in `max_model_len` tokens.

    plain: send no field that OpenAI doesn't have; then answers may end early.
    """
    plan, shortened = [], 0
    extra = {} if plain else {"ignore_eos": True}
    for index, request in enumerate(wanted):
        length, output = max(1, request.prompt_tokens), max(1, request.output_tokens)
        if max_model_len is not None and length + output > max_model_len:
            output = min(output, max_model_len // 2)
            length = min(length, max_model_len - output)
            shortened += 1
        prompt = prompts.make(length, index, request.hash_ids, request.hash_block_tokens)
        plan.append(PlannedRequest(request.arrival, names.of(request.adapter), prompt, output, extra))
    return plan, shortened


def with_questions(wanted: Iterable[Wanted], names: Names, base: str, seed: int, *, chat: bool) -> list[PlannedRequest]:
    """A plan of the workload's arrivals and adapters, with questions whose answers are known in place of its lengths."""
    chosen = [(request.arrival, names.of(request.adapter)) for request in wanted]
    asked = questions(base, [model for _, model in chosen], seed)
    plan = []
    for (at, model), question in zip(chosen, asked, strict=True):
        body = question.body()
        prompt = question.text if chat else body["prompt"]
        plan.append(PlannedRequest(at, model, prompt, body["max_tokens"], question=question))
    return plan
