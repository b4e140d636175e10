"""Questions with exact answers, for the built-in model: counts right answers, wrong ones, and another adapter's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...server.demo.builtin import BUILTIN_NAME
from ...server.demo.questions import Question, Score
from ...server.demo.skills import BASE, SKILLS, sample_inputs
from ..workload.request import TraceRequest

#: Wrong answers that a result shows in full.
_SHOWN = 10
_TEXTS = 256


def has_skills(base: str, adapters: Sequence[str]) -> bool:
    """True if the base model is the built-in one, and every adapter one of its skills or a copy of one."""
    return base == BUILTIN_NAME and all(_skill(name) in SKILLS for name in adapters)


class Questions:
    """A question for every request, about a text that was never trained on, whose length the workload doesn't set."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._texts: dict[str, list[str]] = {}

    def of(self, request: TraceRequest, model: str) -> Question:
        skill = BASE.name if request.adapter is None else _skill(request.adapter)
        if skill not in self._texts:
            self._texts[skill] = sample_inputs(SKILLS.get(skill, BASE), _TEXTS, self._seed)
        return Question(model, self._texts[skill][request.id % _TEXTS], skill)


def judge(asked: Sequence[Question | None], texts: Sequence[str | None]) -> dict[str, Any]:
    """Accuracy of the answers, in total and per model; cross_talk counts answers that are another skill's."""
    scores: dict[str, Score] = {}
    for question, text in zip(asked, texts, strict=True):
        if question is not None and text is not None:
            scores.setdefault(question.model, Score()).add(question, text)
    checked, exact = (sum(getattr(score, name) for score in scores.values()) for name in ("asked", "exact"))
    crossed = [case for score in scores.values() for case in score.crossed]
    return {
        "checked": checked,
        "accuracy": exact / checked if checked else None,
        "cross_talk": len(crossed),
        "crossed": crossed[:_SHOWN],
        "models": {name: score.accuracy for name, score in sorted(scores.items())},
    }


def _skill(adapter: str) -> str:
    """The skill that an adapter is named after: `rot13`, or a copy such as `rot13-00017`."""
    return adapter if adapter in SKILLS else adapter.rpartition("-")[0]
