"""Greedy tokens of a reference, after drafts that it confirms or not, and adapters that it is switched to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .greedy import after_drafts, switched, token_by_token

VOCAB = 17


class Reference:
    """Each token is chosen by all before it. passes: the tokens that each pass had."""

    def __init__(self) -> None:
        self.passes: list[int] = []

    def logits(self, tokens: list[int]) -> torch.Tensor:
        self.passes.append(len(tokens))
        assert torch.is_inference_mode_enabled()
        rows = [torch.Generator().manual_seed(hash(tuple(tokens[: at + 1])) % 2**31) for at in range(len(tokens))]
        return torch.stack([torch.rand(VOCAB, generator=row) for row in rows])

    def __call__(self, inputs: torch.Tensor, past_key_values: list[int] | None, use_cache: bool) -> Any:
        tokens = (past_key_values or []) + inputs[0].tolist()
        return SimpleNamespace(logits=self.logits(tokens)[None], past_key_values=tokens)


PROMPT, COUNT = [3, 1, 4], 6


@pytest.mark.parametrize(
    ("wrong", "most", "passes"),
    [
        ((), COUNT, 1),
        ((0,), COUNT, 2),
        ((2, 4), COUNT, 3),
        (range(COUNT), COUNT, COUNT),
        ((), 1, COUNT),
        ((), 0, COUNT),
    ],
    ids=["right", "first", "two", "all", "one by one", "none"],
)
def test_drafts_change_no_token_and_no_margin(wrong, most, passes):
    want = token_by_token(Reference(), PROMPT, COUNT)

    def draft(tokens: list[int], count: int) -> list[int]:
        assert not torch.is_inference_mode_enabled(), "an engine's tensors are to serve outside, too"
        assert tokens == PROMPT + want[0][: len(tokens) - len(PROMPT)]
        done = len(tokens) - len(PROMPT)
        assert count == COUNT - done
        return [(want[0][at] + (at in wrong)) % VOCAB for at in range(done, COUNT)][:most]

    reference = Reference()
    tokens, margin = after_drafts(reference.logits, draft, PROMPT, COUNT)
    assert (tokens, margin) == (want[0], pytest.approx(want[1]))
    assert len(reference.passes) == passes


def test_no_pass_follows_a_choice_that_is_not_clear():
    reference = Reference()
    tokens, margin = after_drafts(reference.logits, lambda tokens, count: [VOCAB], PROMPT, COUNT, clear=1.0)
    assert tokens == token_by_token(Reference(), PROMPT, 1)[0]
    assert margin < 1.0
    assert len(reference.passes) == 1


def test_a_model_is_switched_only_to_another_adapter():
    calls = []

    class Model:
        base_model = SimpleNamespace(
            enable_adapter_layers=lambda: calls.append("on"), disable_adapter_layers=lambda: calls.append("off")
        )
        set_adapter = calls.append

    one, other = Model(), Model()
    assert [switched(one, name) for name in (None, None, "a", "a", "b", None, None)] == [one] * 7
    assert calls == ["off", "on", "a", "on", "b", "off"]
    calls.clear()
    switched(other, None)
    switched(one, "b")
    assert calls == ["off", "on", "b"]
