"""Weights that a GPU quantises have the bits of a CPU's, whether they are there already or come from the host."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest

from .test_round_to_nearest import weights

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [256, 200])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_gpu_gives_the_same_bits(name, inputs, dtype):
    rows, quantiser = weights(inputs).to(dtype), RoundToNearest(name)
    want = quantiser(rows)
    for found in (quantiser(rows, device="cuda"), quantiser(rows.cuda())):
        assert found.values.is_cuda and found.scales.is_cuda
        assert torch.equal(found.values.cpu().view(torch.uint8), want.values.view(torch.uint8))
        assert torch.equal(found.scales.cpu().view(torch.int32), want.scales.view(torch.int32))
        assert torch.equal(found.dequantised().cpu(), want.dequantised())
