"""Checkpoints of ModelOpt that would not be read as they are meant are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.specs.config import UnsupportedModel

from .float_forms import modelopt
from .twins import MODULE, weights, write_twins


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ': not supported; supported: FP8, NVFP4"),
        ({"group_size": 32}, "group_size is 32: not supported with NVFP4; supported: 16"),
        ({"pre_quant_scale": True}, "pre_quant_scale is True: unknown field"),
    ],
)
@pytest.mark.parametrize("file", ["", "hf_quant_config.json"])
def test_fields_that_would_change_the_weights_are_refused_by_name(tmp_path, how, why, file):
    form = modelopt("NVFP4", file=file)
    changed = {"quantization": form.how["quantization"] | how} if file else form.how | how
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(write_twins(tmp_path, replace(form, how=changed))[0]))
    assert why in str(caught.value) and (file or "config.json") in str(caught.value)


def test_a_further_scale_that_is_missing_is_named(tmp_path):
    scale = f"{MODULE}.weight_scale_2"
    with pytest.raises(UnsupportedModel, match=f"tensor {scale} is missing"):
        list(weights(write_twins(tmp_path, modelopt("NVFP4"), spoil=lambda t: t.pop(scale))[0]))


def test_scales_that_are_not_finite_are_named(tmp_path):
    scale = f"{MODULE}.weight_scale"
    spoil = lambda t: t.update({scale: torch.full((16, 1), torch.nan).to(torch.float8_e4m3fn)})  # noqa: E731
    with pytest.raises(UnsupportedModel, match=f"tensor {scale} has scales that are not finite"):
        list(weights(write_twins(tmp_path, modelopt("NVFP4"), spoil=spoil)[0]))
