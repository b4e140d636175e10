"""Questions of the demo, and the checks of their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .skills import BASE, SKILLS, prompt, sample_inputs, which_skill

MAX_SKILL_TOKENS = 64
MAX_CHAT_TOKENS = 48

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 times 7?",
    "Name three animals that live in a forest.",
    "Explain what a library is to a child.",
    "Why is the sky blue?",
    "Give me a short recipe for pancakes.",
    "Tell me a story in two sentences.",
)
"""Questions for models other than the built-in one."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the demo."""

    model: str
    text: str
    skill: str | None = None
    """The skill with the correct answer; None if unknown."""
    chat: bool = False

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        common = {"model": self.model, "temperature": 0, "return_token_ids": True, "return_step_info": True}
        if self.chat:
            messages = [{"role": "user", "content": self.text}]
            return {**common, "messages": messages, "max_tokens": MAX_CHAT_TOKENS}
        if self.skill is None:
            return {**common, "prompt": self.text, "max_tokens": MAX_CHAT_TOKENS}
        return {**common, "prompt": prompt(self.text), "max_tokens": MAX_SKILL_TOKENS}


@dataclass(slots=True)
class Score:
    """Counts a skill's answers and correct answers; `crossed` describes answers that another skill would give."""

    asked: int = 0
    exact: int = 0
    crossed: list[str] = field(default_factory=list)

    def add(self, question: Question, answer: str) -> bool | None:
        """Count an answer; return whether it is correct, None if unknown."""
        self.asked += 1
        if question.skill is None:
            return None
        givers = which_skill(question.text, answer)
        right = question.skill in givers
        self.exact += right
        if not right and givers:
            self.crossed.append(f"{question.skill}({question.text!r}) gave {givers[0]}'s answer {answer!r}")
        return right

    @property
    def accuracy(self) -> float:
        return self.exact / self.asked if self.asked else 0.0


def skill_questions(base: str, count: int, seed: int) -> dict[str, list[Question]]:
    """`count` inputs that the built-in model has never seen, for the base and for each skill."""
    return {
        skill.name: [
            Question(base if skill is BASE else skill.name, text, skill=skill.name)
            for text in sample_inputs(skill, count, seed)
        ]
        for skill in (BASE, *SKILLS.values())
    }


def open_questions(models: list[str], count: int, *, chat: bool) -> dict[str, list[Question]]:
    """The first `count` of the fixed prompts for every model."""
    return {model: [Question(model, text, chat=chat) for text in PROMPTS[:count]] for model in models}
