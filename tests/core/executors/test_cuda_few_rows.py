"""The kernel for few rows serves every GEMM of every family: a decode step of one row widens no narrow weight."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("triton")

from chorus.core.executors import cpu
from chorus.core.model.batch import GemmBackend
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.weight_plan import NARROW
from chorus.ops.elementwise.elementwise import silu_and_mul
from chorus.ops.gemm import small_gemm_triton
from chorus.ops.gemm.narrow_weights import NarrowWeight

from ..test_families import executor_of, logits_of
from ..tiny_families import EVERY, save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@contextmanager
def kept_narrow(*args, **kwargs):
    """Weights that stay narrow, as on a GPU."""
    with open_weights(*args, **kwargs) as weights:
        weights.plan = NARROW
        yield weights


@pytest.mark.parametrize("family", EVERY)
def test_a_decode_step_widens_no_narrow_weight(tmp_path, family, monkeypatch):
    """Every GEMM of the step is launched by the kernel, with the values of the library's."""
    save_family(family, tmp_path, torch.bfloat16)
    monkeypatch.setattr(cpu, "open_weights", kept_narrow)
    monkeypatch.setattr(cpu, "torch_gemms", lambda config, whole, dtype: dtype)  # also on processors slow in it
    block_tokens = 16 if read_model_config(tmp_path).recurrent is None else 32  # of which a part of a state takes more
    options = {"dtype": "bfloat16", "cpu_kernels": "torch", "quantization": "int4", "block_tokens": block_tokens}
    executor = executor_of(tmp_path, **options)
    decoder, dense, widened, launched = executor.decoder, NarrowWeight.dense, [], []

    def multiply(x, weight, bias=None, *, silu=False, shrunk=None, out=None, compile_only=False):
        launched.append(weight)
        y = linear(x, dense(weight) if isinstance(weight, NarrowWeight) else weight, bias)
        return silu_and_mul(y) if silu else y

    want = logits_of(executor, [[7]])
    kinds = decoder.gemms()
    forward = decoder.forward
    decoder.forward = lambda batch: forward(replace(batch, backends=dict.fromkeys(kinds, GemmBackend.SMALL)))
    with (
        patch.object(small_gemm_triton, "multiply", multiply),
        patch.object(NarrowWeight, "dense", lambda weight: widened.append(weight) or dense(weight)),
    ):
        got = logits_of(executor, [[7]])
    assert torch.equal(got, want)
    assert not widened
    gemms = [place for places in decoder.gemms(every=True).values() for place in places]
    assert len(launched) == len(gemms)
    is_kept_narrow = any(isinstance(place.weight, NarrowWeight) for place in gemms)
    assert is_kept_narrow or any(place.weight.shape[1] % 32 for place in gemms), "some rows are too short to be kept"
