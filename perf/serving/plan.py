"""Plan of a load: a workload's requests, with the server's models, prompts and times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...server.demo.questions import Question
from ..workload.request import TraceRequest
from .answers import Questions
from .errors import LoadError
from .prompts import TokenPrompts, shorten


@dataclass(slots=True)
class PlannedRequest:
    """One request."""

    at: float
    """Seconds since the start of the load."""
    body: dict[str, Any]
    """Body to send."""
    question: Question | None = None
    """The expected answer, if known."""
    shortened: bool = False
    """The workload's lengths did not fit in the model's context."""

    @property
    def model(self) -> str:
        return self.body["model"]


def body(model: str, prompt: str | list[int], max_tokens: int, *, chat: bool = False) -> dict[str, Any]:
    """A streamed greedy request that ends with the server's token count."""
    what = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    options = {"max_tokens": max_tokens, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **what, **options}


class Names:
    """Served adapters that represent a workload's: the one of that name, else the next one in rotation."""

    def __init__(self, adapters: Sequence[str]) -> None:
        self._adapters = list(adapters)
        self._known = {name: name for name in adapters}

    @property
    def substituted(self) -> int:
        """Number of the workload's adapters that others represent."""
        return len(self._known) - len(self._adapters)

    def serve(self, request: TraceRequest) -> TraceRequest:
        """The request with a served adapter's name. Raises LoadError if it needs one and there is none."""
        if request.adapter is None:
            return request
        if request.adapter not in self._known:
            if not self._adapters:
                raise LoadError(
                    f"the workload wants the adapter {request.adapter} and none is to be used; serve adapters, name "
                    "them with --adapters, or set adapters.base_share to 1"
                )
            self._known[request.adapter] = self._adapters[self.substituted % len(self._adapters)]
        return request._replace(adapter=self._known[request.adapter])


def with_prompts(
    requests: Iterable[TraceRequest], base: str, prompts: TokenPrompts, limit: int | None, *, chat: bool, plain: bool
) -> Iterator[PlannedRequest]:
    """Prompts and completions of the workload's lengths, reduced to a context of `limit` tokens.

    plain: send only OpenAI's fields; then completions may end early.
    """
    extra = {} if plain else {"ignore_eos": True}
    for request in requests:
        cut = shorten(request, limit, exact=prompts.exact)
        sent = body(cut.adapter or base, prompts.make(cut), cut.output_tokens, chat=chat)
        yield PlannedRequest(cut.arrival, {**sent, **extra}, shortened=cut is not request)


def with_questions(
    requests: Iterable[TraceRequest], base: str, questions: Questions, *, chat: bool
) -> Iterator[PlannedRequest]:
    """The workload's arrivals and adapters, with questions of known answers in place of its lengths."""
    for request in requests:
        model = request.adapter or base
        question = questions.of(request, model)
        asked = question.body()
        sent = body(model, question.text if chat else asked["prompt"], asked["max_tokens"], chat=chat)
        yield PlannedRequest(request.arrival, sent, question=question)
