"""A quantised checkpoint's logits have the bits of its dequantised twin's."""

from __future__ import annotations

import pytest
import torch

from .model.test_quantization import twins  # noqa: F401
from .test_families import executor_of, logits_of


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_fp8_logits_are_the_twins(twins, architecture):  # noqa: F811
    found, want = (
        logits_of(executor_of(path, dtype="bfloat16"), [[3, 7, 11, 4], [9, 2]]) for path in twins(architecture)
    )
    assert torch.equal(found, want)
    assert found.std() > 0
