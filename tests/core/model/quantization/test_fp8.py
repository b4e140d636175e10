"""FP8 checkpoints that are not as described are refused by name."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.config import UnsupportedModel

from .forms import FORMS
from .twins import MODULE, weights, write_twins

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
