"""The kernels of Gated DeltaNet, interpreted, against their torch paths.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from chorus.ops.mixers import gated_delta as torch_path
from chorus.ops.mixers import gated_delta_triton as kernels
from chorus.ops.mixers.recurrent import RecurrentState

from .delta_layers import DeltaLayer, copy

#: heads of keys and of values, their widths, and what the convolution sees
SHAPES = [(1, 2, 16, 16, 4), (2, 2, 24, 40, 3), (1, 3, 32, 64, 2)]
TOLERANCE = {"rtol": 5e-4, "atol": 5e-5}


def assert_close(one: RecurrentState, other: RecurrentState) -> None:
    torch.testing.assert_close(one.conv, other.conv, rtol=0, atol=0)
    torch.testing.assert_close(one.recurrent, other.recurrent, **TOLERANCE)


@pytest.fixture(params=SHAPES, ids=str)
def layer(request) -> DeltaLayer:
    return DeltaLayer(*request.param)


@pytest.mark.parametrize("tokens", [2, 64, 70])
def test_the_delta_rule_of_a_prompt_is_torchs(layer, tokens):
    v_heads, k_dim, v_dim = layer.shapes[1]
    q, k = (torch.nn.functional.normalize(layer.normal(tokens, v_heads, k_dim), dim=-1) for _ in range(2))
    inputs = torch_path.DeltaInputs(
        q, k, layer.normal(tokens, v_heads, v_dim), -layer.normal(tokens, v_heads).exp(),
        layer.normal(tokens, v_heads).sigmoid(),
    )  # fmt: skip
    state = layer.state(1).recurrent[0]
    want_state = state.clone()
    want = torch_path.chunked(inputs, want_state)
    torch.testing.assert_close(kernels.scan(*inputs, state), want, **TOLERANCE)
    torch.testing.assert_close(state, want_state, **TOLERANCE)


@pytest.mark.parametrize("lengths", [(66, 3), (20, 1, 1)])
def test_a_step_of_a_gpu_is_torchs(layer, monkeypatch, lengths):
    """Prompts by scans."""
    mixed, state = layer.normal(sum(lengths), layer.width), layer.state(len(lengths))
    want_state = copy(state)
    indptr: Sequence[int] = [0, *itertools.accumulate(lengths)]
    want = layer.weights.mix(mixed, want_state, indptr)
    monkeypatch.setattr(torch_path, "_uses_kernels", lambda _: True)
    torch.testing.assert_close(layer.weights.mix(mixed, state, indptr), want, **TOLERANCE)
    assert_close(state, want_state)
