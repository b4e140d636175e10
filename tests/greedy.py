"""Greedy tokens of a reference in transformers + peft, and how clear its choices are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

MIN_MARGIN = 1e-3
"""Greedy choices closer than this are left out of comparisons: they would test rounding, not the engine."""

_used: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
"""Models of PEFT, and the adapter that each is switched to."""


def switched(model: Any, adapter: str | None) -> Any:
    """Switch a model of PEFT to one of its adapters, or to none, and return it. PEFT takes as long as for a token, so a
    model that is switched to the adapter already is left alone: nothing else may switch it.
    """
    if model not in _used or _used[model] != adapter:
        if adapter is None:
            model.base_model.disable_adapter_layers()
        else:
            model.base_model.enable_adapter_layers()
            model.set_adapter(adapter)
        _used[model] = adapter
    return model


@torch.inference_mode()
def token_by_token(model: Any, inputs: list[int], count: int) -> tuple[list[int], float]:
    """Greedy tokens with the model's own cache, and by how much the closest one leads."""
    tokens, margin, cache = list[int](), float("inf"), None
    while len(tokens) < count:
        output = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True)
        best = output.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        inputs, cache = [int(best.indices[0])], output.past_key_values
        tokens += inputs
    return tokens, margin


@torch.inference_mode()
def logprobs_of(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """A reference's log-probabilities of an answer's tokens: a soft cap changes these, and no greedy token."""
    rows = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def after_drafts(
    logits: Callable[[list[int]], torch.Tensor],
    draft: Callable[[list[int], int], list[int]],
    prompt: list[int],
    count: int,
    clear: float = 0.0,
) -> tuple[list[int], float]:
    """As `token_by_token`, in one pass for all tokens of a draft that are the reference's own choices.

    logits: of the reference `[len(tokens), vocab]`, by tokens. draft: guesses so many tokens after others, or fewer.
    clear: the least lead; no tokens are computed after a pass with a closer choice.
    """
    tokens, margin = list[int](), float("inf")
    while len(tokens) < count and margin >= clear:
        guesses = draft(prompt + tokens, count - len(tokens)) or [-1]  # which no choice is
        with torch.inference_mode():
            best = logits(prompt + tokens + guesses[:-1])[-len(guesses) :].topk(2)
        for guess, (first, second), (choice, _) in zip(guesses, *map(torch.Tensor.tolist, best), strict=True):
            tokens.append(choice)
            margin = min(margin, first - second)
            if guess != choice:
                break
    return tokens, margin
