"""Rows rounded to FP8, by torch and by the kernel, and their products with weights in FP8."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from chorus.ops.gemm import float8_rows
from chorus.ops.gemm.narrow_weights import NarrowWeight, keep

from ...processes import run_python

CPU = torch.device("cpu")
DTYPES = torch.float32, torch.bfloat16, torch.float16


def rows_of(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of many sizes, of zeros, with the smallest numbers, and at the ends of a power of two."""
    generator = torch.Generator().manual_seed(width)
    sizes = torch.tensor([1e-6, 1e-3, 1.0, 30.0, 3e3])[:, None]
    x = torch.randn(5, width, generator=generator) * sizes
    x = torch.cat([x, torch.zeros(4, width)])
    x[6, 0], x[7, :2], x[8, :2] = 1e-39, torch.tensor([448.0, -3.0]), torch.tensor([-450.0, 2.0**-9])
    return x.to(dtype)


def by_definition(row: list[float]) -> tuple[list[float], float]:
    """Values and scale of a row, one by one."""
    most = max(map(abs, row))
    exponent = -126 if most == 0 else max(-126, math.ceil(math.log2(most / 448)))
    scale = 2.0**exponent
    grid = sorted({(8 + m) * 2.0**e for e in range(-9, 6) for m in range(8)} | {m * 2.0**-9 for m in range(8)})[:127]

    def nearest(value: float) -> float:
        size = abs(value) / scale
        low = max(at for at, each in enumerate(grid) if each <= size)
        high = min(low + 1, len(grid) - 1)
        below, above = size - grid[low], grid[high] - size
        at = low if below < above or (below == above and low % 2 == 0) else high
        return math.copysign(grid[at], value)

    return [nearest(value) for value in row], scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_by_the_definition(dtype):
    x = rows_of(40, dtype)
    values, scales = float8_rows.quantised(x)
    for row, its, scale in zip(x.double().tolist(), values.double().tolist(), scales.flatten().tolist(), strict=True):
        assert (its, scale) == by_definition(row)
    dense = float8_rows.rounded(x)
    assert dense.dtype is dtype
    wide = values.double() * scales
    if dtype is not torch.float16:
        assert torch.equal(dense.double(), wide), "nothing is rounded again"
    error = (dense.double() - x.double()).abs()
    assert (error <= x.double().abs() / 16 + scales.double() * 2.0**-10).all()


def test_a_row_does_not_depend_on_others_and_one_that_is_not_finite_is_nan():
    x = rows_of(48, torch.bfloat16)
    want = float8_rows.rounded(x)
    assert all(torch.equal(float8_rows.rounded(x[i : i + 1])[0], want[i]) for i in range(len(x)))
    x[1, 3], x[4, 5] = torch.inf, torch.nan
    found = float8_rows.rounded(x)
    assert found[[1, 4]].isnan().all()
    others = [0, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[others], want[others])


def weight_of(outputs: int, inputs: int, dtype: torch.dtype) -> NarrowWeight:
    generator = torch.Generator().manual_seed(outputs)
    values = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(outputs, 1, generator=generator) * 0.01 + 1e-3
    return keep(values, scales, None, bits=8, group=inputs, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_both_ways_to_multiply_give_the_product_of_the_rounded_rows(dtype, has_bias):
    weight, x = weight_of(48, 64, dtype), rows_of(64, dtype)[:5]
    bias = torch.linspace(-1, 1, 48, dtype=dtype) if has_bias else None
    values, scales = float8_rows.quantised(x)
    exact = (values.double() * scales) @ (weight.data.view(torch.float8_e4m3fn).double() * weight.scales).T
    want = exact if bias is None else exact + bias.double()
    sizes = want.abs().amax(-1, keepdim=True)
    assert float8_rows.is_multiplied(weight)
    for its in (weight, replace(weight, multiplies_float8=True)):
        found = float8_rows.multiply(x, its, bias)
        assert found.dtype is dtype
        limit = 1e-5 if dtype is torch.float32 else 2.0**-7
        assert ((found.double() - want).abs() <= limit * sizes).all()


def test_products_in_fp8_need_one_scale_a_row_and_multiples():
    assert not float8_rows.is_multiplied(weight_of(40, 64, torch.bfloat16))
    assert not float8_rows.is_multiplied(weight_of(48, 72, torch.bfloat16))
    values, scales = torch.zeros(48, 256).to(torch.float8_e4m3fn), torch.ones(48, 2)
    blocks = keep(values, scales, None, bits=8, group=128, dtype=torch.bfloat16, device=CPU)
    assert not float8_rows.is_multiplied(blocks)


def round_all() -> None:
    """Run in a process that interprets."""
    from chorus.ops.gemm.float8_rows_triton import quantise, round_rows

    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    for width in (40, 200):
        for dtype in (torch.float32, torch.bfloat16):
            x = rows_of(width, dtype)
            want, (values, scales) = float8_rows.quantised(x), quantise(x)
            assert torch.equal(values.view(torch.uint8), want.values.view(torch.uint8)), (width, dtype)
            assert torch.equal(scales, want.scales), (width, dtype)
            assert torch.equal(round_rows(x), float8_rows.rounded(x)), (width, dtype)
            x[1, 3], x[4, 5], x[5, 0] = torch.inf, torch.nan, -torch.inf
            assert torch.equal(round_rows(x).isnan(), float8_rows.rounded(x).isnan())
            assert quantise(x)[1].flatten().isnan().tolist() == [each in (1, 4, 5) for each in range(len(x))]


@pytest.mark.triton
def test_the_kernel_rounds_to_the_same_bits():
    result = run_python("-c", "from tests.ops.gemm.test_float8_rows import *; round_all()", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
