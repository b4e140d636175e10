"""Activations rounded to 8 bits, value by value, and what configurations say of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from chorus.core.model.checkpoints.quantization.rounded_inputs import RoundedInputs
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel

from .integer_forms import compressed_integers
from .twins import MODULE, Form, write_twins


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "block"), [(64, 64), (200, 64), (40, 16), (7, 8)])
def test_each_block_of_a_row_has_its_own_step(dtype, inputs, block):
    x = (torch.randn(5, inputs, generator=torch.Generator().manual_seed(inputs)) ** 3).to(dtype)
    x[3] = 0
    found = RoundedInputs(block)(x)
    assert found.dtype == dtype and found.shape == x.shape
    for row, given in zip(found.double().tolist(), x.double().tolist(), strict=True):
        for first in range(0, inputs, block):
            part, step = given[first : first + block], max(map(abs, given[first : first + block])) / 127
            for value, rounded in zip(part, row[first : first + block], strict=True):
                error = abs(rounded) * (1e-6 if dtype == torch.float32 else 2**-8)
                assert abs(rounded - value) <= 0.50001 * step + error
                assert not step or abs(rounded - step * round(rounded / step)) <= error


def test_a_row_does_not_depend_on_others():
    x = torch.randn(9, 130, generator=torch.Generator().manual_seed(0))
    every = RoundedInputs()(x)
    assert all(torch.equal(RoundedInputs()(x[row : row + 1])[0], every[row]) for row in range(9))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_its_block(value):
    x = torch.ones(2, 128)
    x[1, 70] = value
    found = RoundedInputs(64)(x)
    assert found[1, 64:].isnan().all()
    assert torch.equal(found[0], x[0]) and torch.equal(found[1, :64], x[1, :64])


@pytest.mark.parametrize(
    ("group", "inputs", "block"), [(300, 300, 64), (128, 300, 64), (32, 300, 32), (96, 300, 32), (8, 300, 8)]
)
def test_a_block_is_within_a_group_of_weights(group, inputs, block):
    assert RoundedInputs().within(group, inputs).block == block


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def with_inputs(inputs: Any, bits: int = 8) -> Form:
    form = compressed_integers(bits, "channel", is_packed=False)
    group = {**form.how["config_groups"]["group_0"], "input_activations": inputs}
    return replace(form, how={**form.how, "config_groups": {"group_0": group}})


@pytest.mark.parametrize(
    ("inputs", "want"),
    [
        (DYNAMIC, RoundedInputs()),
        ({**DYNAMIC, "group_size": None, "observer": None, "observer_kwargs": {}, "actorder": None}, RoundedInputs()),
        ({**DYNAMIC, "strategy": "tensor"}, RoundedInputs()),
        ({**DYNAMIC, "strategy": "group", "group_size": 32}, RoundedInputs(32)),
        ({"dynamic": True}, RoundedInputs()),
        ({"dynamic": True, "group_size": 128}, RoundedInputs(128)),
        ({**DYNAMIC, "dynamic": False}, None),
        ({**DYNAMIC, "dynamic": "local"}, None),
        ({**DYNAMIC, "symmetric": False}, None),
        ({**DYNAMIC, "type": "float"}, None),
        ({**DYNAMIC, "num_bits": 4}, None),
        (None, None),
    ],
)
def test_a_checkpoint_says_how(tmp_path, inputs, want):
    how = read_model_config(write_twins(tmp_path, with_inputs(inputs))[0]).weight_format
    assert how is not None
    narrow = how.narrow(f"{MODULE}.weight")
    assert narrow is not None and narrow.inputs == want
    assert ("activations of 8 bits" in how.title) == (want is not None)


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([8], "input_activations is [8]: an object is needed"),
        ({**DYNAMIC, "num_bits": "8"}, "input_activations.num_bits is '8': a whole number of at least 1 is needed"),
        ({**DYNAMIC, "dynamic": "yes"}, "dynamic is 'yes': not supported; supported: true, false, local"),
        ({**DYNAMIC, "symmetric": 1}, "input_activations.symmetric is 1: true or false is needed"),
        ({**DYNAMIC, "strategy": "block"}, "strategy is 'block': not supported for activations"),
        ({**DYNAMIC, "strategy": "group"}, "group_size is missing: a whole number of at least 1 is needed"),
        ({**DYNAMIC, "strategy": "group", "group_size": 12}, "group_size is 12: not supported for activations"),
        ({**DYNAMIC, "strategy": "group", "group_size": 1 << 17}, "multiples of 8 up to 65536"),
        ({**DYNAMIC, "strategy": "group", "group_size": -8}, "group_size is -8: a whole number of at least 1"),
        ({**DYNAMIC, "clip": 1}, "input_activations.clip is 1: unknown field"),
    ],
)
def test_damaged_configurations_get_one_line(tmp_path, inputs, why):
    with pytest.raises(UnsupportedModel) as caught:
        read_model_config(write_twins(tmp_path, with_inputs(inputs))[0])
    assert "\n" not in str(caught.value)
    assert why in str(caught.value)
