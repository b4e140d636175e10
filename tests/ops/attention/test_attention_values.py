"""Attention backends are compared with PyTorch's operators before they serve."""

from __future__ import annotations

import pytest
import torch

from chorus.ops.attention import attention_flashinfer
from chorus.ops.attention.attention import PLAIN, AttentionSetup, HeadShape, PagedAttention, Scores
from chorus.ops.attention.attention_flashinfer import FlashInferBackend
from chorus.ops.attention.attention_values import values_problem

from .fake_flashinfer import FakeFlashInfer, Stream

SCORES = (PLAIN, Scores(0.3, 5), Scores(0.2, None, 2.0))


def made(scores=(PLAIN,), *, max_rows=4, pages=4, float8_kv=False, block_tokens=4):
    stream = Stream()
    shape = HeadShape(8, 2, 8, block_tokens)
    setup = AttentionSetup(
        shape, torch.float32, torch.device("cpu"), max_rows, pages, scores=scores, float8_kv=float8_kv
    )
    return setup, FlashInferBackend(setup, 2, module=FakeFlashInfer(stream), new_event=stream.new_event)


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch):
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    monkeypatch.setattr(attention_flashinfer, "DECODE_INT_WORKSPACE_BYTES", 64)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    "sizes", [{}, {"max_rows": 1}, {"pages": 1}, {"float8_kv": True}, {"block_tokens": 3}], ids=str
)
def test_the_right_values_pass(scores, sizes):
    assert values_problem(*made((scores,), **sizes)) is None


class Wrong:
    """A backend that is wrong in one of its kinds of steps, from one of its calls on."""

    def __init__(self, setup, of, first):
        self._heads, self._of, self._first = setup.heads, of, first

    def ragged(self):
        return self._made("ragged")

    def decode(self, bucket):
        return self._made("decode")

    def _made(self, kind):
        right = PagedAttention(self._heads, torch.device("cpu"))
        inner, calls = right.run, []

        def run(*args, **kwargs):
            calls.append(None)
            found = inner(*args, **kwargs)
            if kind == self._of and len(calls) > self._first:
                found[-1, -1] += 0.01
            return found

        right.run = run
        return right


@pytest.mark.parametrize(("of", "first"), [("ragged", 0), ("decode", 0), ("decode", 1)])
def test_wrong_values_are_told(of, first):
    """Of prompts, of a bucket's first plan, and of those that follow, which FlashInfer makes otherwise."""
    setup, _ = made()
    problem = values_problem(setup, Wrong(setup, of, first))
    assert problem is not None
    assert problem.startswith("it differs by")


def test_a_backend_that_fails_is_told(monkeypatch):
    setup, backend = made()

    def refuse(*args, **kwargs):
        raise TypeError("plan() got an unexpected keyword\nat line 1")

    monkeypatch.setattr(backend.module, "BatchPrefillWithPagedKVCacheWrapper", refuse)
    assert values_problem(setup, backend) == "TypeError: plan() got an unexpected keyword"
