"""Requests of a model and its adapters, with the tokens that transformers + peft give."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..tiny_families import ADAPTERS
from .subject import Subject


@dataclass(frozen=True)
class Asked:
    """So many requests, at least one of each adapter, of prompts and answers of these lengths."""

    count: int
    lengths: tuple[int, int]
    tokens: int

    def add(self, subject: Subject, driver: Any, turn: str = "") -> dict[str, list[int]]:
        """Add the requests; return the answers of transformers and peft."""
        rng, want, adapters = random.Random(0), {}, subject.adapters
        count = min(self.tokens, subject.most_tokens)
        for index in range(max(self.count, len(adapters))):
            adapter, name = adapters[index % len(adapters)], f"{turn}{index}"
            prompt, want[name] = subject.it.case(adapter, rng.randint(*self.lengths), seed=index, count=count)
            driver.add(name, adapter, prompt, max_tokens=count)
        return want


PROMPTS = Asked(4, (5, 70), 8)
ANSWERS = Asked(4, (5, 20), 16)
CROWD = Asked(8, (5, 20), 16)
LONG = Asked(4, (190, 230), 6)


def answers(it, driver, count, seed, lengths=(5, 70), tokens=8, adapters=(None, *ADAPTERS)):
    """Add requests of these adapters, None for the base model; return the answers of transformers and peft."""
    rng, want = random.Random(seed), {}
    for index in range(count):
        adapter = adapters[index % len(adapters)]
        prompt, want[f"{seed}.{index}"] = it.case(adapter, rng.randint(*lengths), seed=index, count=tokens)
        driver.add(f"{seed}.{index}", adapter, prompt, max_tokens=tokens)
    return want


def told(driver: Any, want: Mapping[str, Any]) -> dict[str, list[int]]:
    """The tokens of these requests, when all that were added have ended."""
    answered = driver.drain()
    assert not {name: answered[name].error for name in want if answered[name].error}
    return {name: answered[name].tokens for name in want}


def check_variety(it, num_prompts=4):
    """Answers of transformers and peft vary, and every adapter changes them: comparisons with them mean something."""
    cases = [it.case(None, 20, seed=seed) for seed in range(99, 99 + num_prompts)]
    outputs = {None: tuple(tuple(base) for _, base in cases)}
    outputs |= {name: tuple(tuple(it.greedy(name, prompt, 8)[0]) for prompt, _ in cases) for name in ADAPTERS}
    assert len(set(outputs.values())) == 4
    assert len({token for base in outputs[None] for token in base}) >= 4
