"""The head's product: into memory in the model's dtype where nothing is added, else in float32."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chorus.core.model.program.ends import LOGITS, STATES, logits_dtype
from chorus.core.model.program.ops.logits import Logits
from chorus.core.model.program.torch_step import Step, batch_of_parts
from chorus.core.model.read_config import read_model_config

from ...tiny_families import make_tiny

ROWS, VOCAB, HIDDEN = 3, 50, 32


class Made(TorchDispatchMode):
    """Dtypes of all results as large as a step's logits."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == (ROWS, VOCAB):
            self.dtypes.append(result.dtype)
        return result


def found(memory=None, dtype=torch.bfloat16, added=None, bias=False):
    """The logits of a step, the float32 logits that they should be, and dtypes that were made on the way."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, HIDDEN, generator=generator).to(dtype) for rows in (ROWS, VOCAB))
    weights = {"head": weight, "head_bias": torch.randn(VOCAB, generator=generator)}
    op = Logits(STATES, LOGITS, VOCAB, bias="head_bias" if bias else None)
    step = Step(batch_of_parts(), {0: weights}, {STATES: x}, added_logits=added)
    if memory is not None:
        step.names[LOGITS] = memory
    with Made() as made:
        op.torch(SimpleNamespace(index=0, model=SimpleNamespace(ranks=None)))(step)
    want = torch.nn.functional.linear(x, weight).float()
    return step.names[LOGITS], want + weights["head_bias"] if bias else want, made.dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_written_to_memory_of_its_dtype_and_never_widened(dtype):
    memory = torch.full((ROWS, VOCAB), torch.nan, dtype=dtype)
    got, want, made = found(memory, dtype)
    assert got is memory
    assert torch.equal(got.float(), want)
    assert set(made) == {dtype}


def add_one(logits, x, first):
    assert logits.dtype == torch.float32
    logits.add_(1)


def test_what_adapters_add_is_added_in_float32():
    memory = torch.zeros(ROWS, VOCAB, dtype=torch.bfloat16)
    got, want, _ = found(memory, added=add_one)
    assert torch.equal(got, want + 1) and got.dtype == torch.float32
    assert not memory.any(), "the next step may still read it"
    wide = torch.zeros(ROWS, VOCAB)
    got, want, _ = found(wide, added=add_one)
    assert got is wide
    assert torch.equal(got, want + 1)


def test_without_memory_and_in_float32_memory_logits_are_float32():
    for memory in (None, torch.zeros(ROWS, VOCAB)):
        got, want, _ = found(memory, bias=True)
        assert torch.equal(got, want)
        assert memory is None or got is memory


def test_logits_that_change_after_the_product_stay_float32():
    plain = read_model_config(make_tiny("llama2").model)
    assert logits_dtype(plain, torch.bfloat16) == torch.bfloat16
    for changed in ({"logits_scale": 0.5}, {"logits_softcap": 30.0}, {"head_bias": True}):
        assert logits_dtype(replace(plain, **changed), torch.bfloat16) == torch.float32
