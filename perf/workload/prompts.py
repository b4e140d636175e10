"""Prompts for real servers: texts and token ids of a request's length, and questions whose answers are known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...server.demo.skills import BASE, SKILLS, Skill, prompt, sample_inputs
from .errors import WorkloadError
from .request import TraceRequest
from .seeds import hashed_uniform

# words that common tokenizers make one token of, with the space before it
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education
"""
_WORDS = _TEXT.split()

_QUESTIONS = 256

#: Positions that a request without prefix hashes has to itself.
_ROOM = 1 << 24


class Prompt(NamedTuple):
    """A text to complete and, where it is known, the right answer."""

    text: str
    answer: str | None = None


def filler(request: TraceRequest, seed: int = 0) -> Prompt:
    """English words, about a token each. Prompts that share prefix hashes begin with the same text."""
    indices = (_numbers(request, seed) * len(_WORDS)).astype(np.int64).tolist()
    return Prompt(" ".join(_WORDS[index] for index in indices))


def token_ids(request: TraceRequest, vocab: int, first: int = 0, seed: int = 0) -> list[int]:
    """Exactly `prompt_tokens` ids of [first, vocab). Prompts that share prefix hashes begin with the same ids."""
    if not 0 <= first < vocab:
        raise WorkloadError(f"first is {first} and vocab {vocab}; first must be from 0 to vocab - 1")
    return (first + _numbers(request, seed) * (vocab - first)).astype(np.int64).tolist()


class SkillPrompts:
    """Questions for the built-in model's adapters, with the answers that are right.

    An adapter has the skill that it is named after: `rot13`, or a copy such as `rot13-00017`. Requests without an
    adapter ask the base model, which repeats the text. A question's length is its own, not the workload's.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._inputs: dict[str, list[str]] = {}

    def __call__(self, request: TraceRequest) -> Prompt:
        """
        Raises:
            WorkloadError: for an adapter that is named after no skill.
        """
        skill = self._skill(request.adapter)
        if skill.name not in self._inputs:
            self._inputs[skill.name] = sample_inputs(skill, _QUESTIONS, self._seed)
        text = self._inputs[skill.name][request.id % _QUESTIONS]
        return Prompt(prompt(text), skill.apply(text))

    @staticmethod
    def _skill(adapter: str | None) -> Skill:
        if adapter is None:
            return BASE
        skill = SKILLS.get(adapter) or SKILLS.get(adapter.rpartition("-")[0])
        if skill is None:
            raise WorkloadError(
                f"adapter {adapter!r} is named after no skill of the built-in model; name it after one of "
                f"{', '.join(SKILLS)}, or a copy like rot13-00001"
            )
        return skill


def _numbers(request: TraceRequest, seed: int) -> np.ndarray:
    """A number in [0, 1) per prompt token: decided by the block's hash id, or by the request's id without any."""
    positions = np.arange(request.prompt_tokens, dtype=np.int64)
    if not request.hash_ids:
        return hashed_uniform(seed, "prompt", request.id * _ROOM + positions)
    block = request.hash_block_tokens
    ids = np.array(request.hash_ids, np.int64)[positions // block]
    return hashed_uniform(seed, "prompt blocks", ids * block + positions % block)
