"""Rows rounded to FP8 on a GPU, and their products with weights in FP8: as on a CPU, for any number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from chorus.core.executors.cuda_float8_gemms import LEAST_CAPABILITY
from chorus.ops.gemm import float8_rows
from chorus.ops.gemm.narrow_weights import NarrowWeight

from .test_float8_rows import rows_of, weight_of

IS_OLD = not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY
pytestmark = [
    pytest.mark.skipif(IS_OLD, reason="needs an NVIDIA GPU of compute capability 8.9 or later"),
]


@pytest.mark.parametrize("width", [40, 4096, 14336])
def test_rows_are_rounded_to_the_same_bits(width):
    x = rows_of(width, torch.bfloat16)
    want, (values, scales) = float8_rows.quantised(x), float8_rows.quantised(x.cuda())
    assert torch.equal(values.cpu().view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(scales.cpu(), want.scales)
    x[2, 3] = torch.nan
    assert torch.equal(float8_rows.rounded(x.cuda()).cpu().isnan(), float8_rows.rounded(x).isnan())


def on_gpu(weight: NarrowWeight) -> NarrowWeight:
    return replace(weight, data=weight.data.cuda(), scales=weight.scales.cuda())


@pytest.mark.parametrize("rows", [1, 17, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_both_ways_to_multiply_give_the_product_of_the_rounded_rows(rows, has_bias):
    weight = weight_of(512, 4096, torch.bfloat16)
    x = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(rows)).bfloat16()
    bias = torch.linspace(-1, 1, 512).bfloat16() if has_bias else None
    values, scales = float8_rows.quantised(x)
    want = (values.double() * scales) @ (weight.data.view(torch.float8_e4m3fn).double() * weight.scales).T
    want = want if bias is None else want + bias.double()
    for multiplies_float8 in (False, True):
        its = replace(on_gpu(weight), multiplies_float8=multiplies_float8)
        found = float8_rows.multiply(x.cuda(), its, None if bias is None else bias.cuda())
        error = (found.cpu().double() - want).abs().max() / want.abs().max()
        assert error <= 2.0**-7, (rows, multiplies_float8)
