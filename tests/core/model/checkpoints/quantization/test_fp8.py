"""FP8 checkpoints that are not as described are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.checkpoints.quantization.group_scaled import GroupScaled
from chorus.core.model.checkpoints.quantization.rounded_inputs import Float8Inputs
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.open_weights import open_weights

from .forms import FORMS
from .twins import AS_STORED, MODULE, Form, weights, write_twins

pytestmark = pytest.mark.wide

WEIGHT = f"{MODULE}.weight"
SCALE = f"{WEIGHT}_scale_inv"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda t: t.pop(SCALE), "o_proj.weight_scale_inv is missing"),
        (lambda t: t.update({SCALE: torch.ones(2, 2)}), r"o_proj.weight_scale_inv has shape \[2, 2\]"),
        (lambda t: t[SCALE].fill_(torch.nan), "o_proj.weight_scale_inv has scales that are not finite"),
        (lambda t: t[SCALE].fill_(0), "o_proj.weight_scale_inv has scales that are not above 0"),
        (lambda t: t.update({WEIGHT: torch.ones(16, 16)}), "o_proj.weight is stored as F32; supported: F8_E4M3"),
    ],
)
def test_bad_scales_are_refused_by_name(tmp_path, spoil, why):
    quantised, _ = write_twins(tmp_path, FORMS["fp8 blocks"], spoil=spoil)
    with pytest.raises(UnsupportedModel, match=why):
        list(weights(quantised))


def with_inputs(inputs: dict | None) -> Form:
    """Weights of compressed-tensors in FP8, with a scale per output."""
    form = FORMS["compressed fp8, channels"]
    group = {**form.how["config_groups"]["group_0"], "input_activations": inputs}
    return replace(form, how={**form.how, "config_groups": {"group_0": group}})


DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("form", "asks"),
    [
        (FORMS["fp8"], True),
        (replace(FORMS["fp8 channels"], how={**FORMS["fp8 channels"].how, "activation_scheme": "static"}), True),
        (FORMS["fbgemm fp8"], True),
        (FORMS["modelopt fp8"], True),
        (with_inputs(DYNAMIC), True),
        (with_inputs({**DYNAMIC, "strategy": "tensor", "dynamic": False}), True),
        (with_inputs(None), False),
        (with_inputs({**DYNAMIC, "num_bits": 4}), False),
        (with_inputs({**DYNAMIC, "type": "int"}), False),
        (FORMS["fp8 blocks"], False),  # a row of activations has one scale, whatever the blocks
        (FORMS["compressed int8"], False),
    ],
)
def test_which_forms_ask_for_activations_in_fp8(tmp_path, form, asks):
    path, _ = write_twins(tmp_path, form)
    model = read_model_config(path)
    with open_weights(path, model, torch.float32) as found:
        assert found.asks_float8_inputs is asks
        assert not found.rounds_inputs, "a CPU multiplies them as they are"
        found.plan, kept = AS_STORED, []
        list(found.layers(kept.append))
    is_asked = {isinstance(each.inputs, Float8Inputs) for each in kept if isinstance(each, GroupScaled)}
    assert is_asked == {asks}


FP8_FORMS = [name for name in FORMS if "fp8" in name]


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("form", FP8_FORMS)
def test_a_weight_that_is_nan_is_refused_by_name(tmp_path, form, byte):
    def spoil(tensors):
        tensors[WEIGHT].view(torch.uint8)[-1, 3] = byte

    quantised, _ = write_twins(tmp_path, FORMS[form], spoil=spoil)
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(quantised))
    said = str(caught.value)
    assert f"tensor {WEIGHT} has weights that are NaN; download or quantise the checkpoint again" in said
    assert str(tmp_path) in said and "\n" not in said


@pytest.mark.parametrize("byte", [0x7E, 0xFE])
def test_the_largest_weights_are_read(tmp_path, byte):
    def spoil(tensors):
        tensors[WEIGHT].view(torch.uint8)[-1, 3] = byte

    quantised, _ = write_twins(tmp_path, FORMS["fp8"], spoil=spoil)
    assert all(each is None or bool(each.isfinite().all()) for each in weights(quantised))


@pytest.mark.parametrize("form", ["modelopt nvfp4", "compressed nvfp4"])
def test_a_scale_in_fp8_that_is_nan_is_refused_by_name(tmp_path, form):
    def spoil(tensors):
        tensors[f"{WEIGHT}_scale"].view(torch.uint8)[-1, 0] = 0xFF

    quantised, _ = write_twins(tmp_path, FORMS[form], spoil=spoil)
    with pytest.raises(UnsupportedModel, match=r"o_proj\.weight_scale has scales that are not finite"):
        list(weights(quantised))


@pytest.mark.parametrize(
    ("form", "end"), [("compressed mxfp4", "weight_scale"), ("fp8 blocks, powers of 2", "weight_scale_inv")]
)
def test_a_power_of_two_that_is_nan_is_refused_by_name(tmp_path, form, end):
    def spoil(tensors):
        tensors[f"{MODULE}.{end}"].view(torch.uint8)[-1, 0] = 0xFF

    quantised, _ = write_twins(tmp_path, FORMS[form], spoil=spoil)
    with pytest.raises(UnsupportedModel, match=rf"o_proj\.{end} has (scales that are not finite|the value 255)"):
        list(weights(quantised))
