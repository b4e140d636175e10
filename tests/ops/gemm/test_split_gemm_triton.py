"""The product whose inputs several programs share, without a GPU: values in Triton's interpreter against float64, and
bits of rows in other company; a process for each. Compiled: `python -m chorus.perf.kernels`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from chorus.ops.gemm.split_gemm_schedule import SplitConstants, is_split

from ...processes import run_python
from .test_small_gemm_triton import TOLERANCE, Case, Inputs, product

#: (inputs, outputs): parts of one block and of none; of several; an input that no block divides.
SHAPES = ((40, 24), (300, 140), (512, 128), (1090, 33))


def test_parts_have_all_inputs_once():
    for d_in in (1, 64, 65, 255, 256, 4096, 14336, 14400):
        constants = SplitConstants(d_in, 64, bias=False)
        assert constants.share % constants.block_k == 0
        assert constants.share * constants.parts >= d_in


def test_long_sums_of_few_columns_are_split_in_tiles_of_64_rows():
    assert is_split(4096, 14336, 64) and is_split(4096, 4096, 17)
    assert not is_split(4096, 14336, 16), "the tile of 16 rows splits the sum among its warps"
    assert not is_split(28672, 4096, 64), "there are many programs as it is"
    assert not is_split(2048, 768, 64)


def interpret() -> None:
    """Run in a process of its own."""
    from chorus.ops.gemm import split_gemm_triton

    from ..bf16_interpreter import fix_bf16, multiply_row_by_row

    fix_bf16()
    multiply_row_by_row()
    for seed, (shape, rows, bias) in enumerate(itertools.product(SHAPES, (64, 17), (True, False))):
        for dtype in (torch.bfloat16, torch.float16):
            inputs = Inputs(Case(seed, rows, shape, bias, silu=False, spare=3), dtype)
            assert isinstance(inputs.weight, torch.Tensor)
            got = split_gemm_triton.multiply(inputs.x, inputs.weight, inputs.bias)
            want = product(inputs.x, inputs.weight, inputs.bias, silu=False)
            assert got.dtype is dtype and got.shape == want.shape
            assert (got.double() - want.double()).abs().max() <= TOLERANCE[dtype] * want.double().abs().max()
            order = list(range(rows))[::-2]
            alone = split_gemm_triton.multiply(inputs.x[order], inputs.weight, inputs.bias)
            assert torch.equal(alone, got[order])
            assert not split_gemm_triton._arrived(torch.device("cpu")).any()  # noqa: SLF001 - for the next launch


def interpret_orders() -> None:
    """Whichever program arrives last, the parts are added in order. Run in a process of its own."""
    from triton.runtime.interpreter import InterpreterBuilder

    from chorus.ops.gemm import split_gemm_triton

    generator, plain, found = torch.Generator().manual_seed(1), InterpreterBuilder.set_grid_idx, []
    x, weight = torch.randn(17, 1000, generator=generator), torch.randn(16, 1000, generator=generator)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        InterpreterBuilder.set_grid_idx = lambda self, x, y, z, order=order: plain(self, x, order[y], z)
        found.append(split_gemm_triton.multiply(x, weight))
    assert all(torch.equal(each, found[0]) for each in found)
    assert (found[0].double() - x.double() @ weight.double().T).abs().max() < 1e-4


@pytest.mark.triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("run", ["interpret", "interpret_orders"])
def test_values_equal_the_definition_and_rows_keep_their_bits(run):
    command = f"from tests.ops.gemm.test_split_gemm_triton import *; {run}()"
    result = run_python("-c", command, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
