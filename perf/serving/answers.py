"""Questions with exact answers, for the built-in model: is every answer right, and is any another adapter's?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...server.demo.builtin import BUILTIN_NAME
from ...server.demo.questions import Question, Score
from ...server.demo.skills import BASE, SKILLS, sample_inputs
from .record import Record

#: Wrong answers that a result shows in full.
_SHOWN = 10


def has_skills(names: Sequence[str]) -> bool:
    """Whether these models, the base first, are the built-in one and adapters that it is served with."""
    return bool(names) and names[0] == BUILTIN_NAME and all(name in SKILLS for name in names[1:])


def questions(base: str, models: Sequence[str], seed: int) -> list[Question]:
    """A question for each entry of `models`, every one about a text that was never trained on nor asked before."""
    queues = {}
    for name, count in Counter(models).items():
        skill = BASE.name if name == base else name
        queues[name] = iter([Question(name, text, skill) for text in sample_inputs(skill, count, seed)])
    return [next(queues[name]) for name in models]


def judge(asked: Sequence[Question], records: Sequence[Record]) -> dict[str, Any]:
    """Accuracy of what was answered, in all and per model; cross_talk counts answers that are another skill's."""
    scores: dict[str, Score] = {}
    for question, record in zip(asked, records, strict=True):
        if record.ok:
            scores.setdefault(question.model, Score()).add(question, record.text)
    total, exact = (sum(getattr(score, name) for score in scores.values()) for name in ("asked", "exact"))
    crossed = [case for score in scores.values() for case in score.crossed]
    return {
        "checked": total,
        "accuracy": exact / total if total else None,
        "cross_talk": len(crossed),
        "crossed": crossed[:_SHOWN],
        "models": {name: score.accuracy for name, score in sorted(scores.items())},
    }
