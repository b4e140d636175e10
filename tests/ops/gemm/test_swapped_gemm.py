"""The GEMM whose narrow weights are the first operand, without a GPU: values in Triton's interpreter against float64,
bits of rows in steps of 1 to 256 rows, and an offline compile; a process for each.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from chorus.ops.gemm.narrow_weights import is_kept, keep_float4
from chorus.ops.gemm.small_gemm_schedule import WeightForm
from chorus.ops.gemm.swapped_gemm_schedule import TILE_ROWS, swapped_constants, tile_of

from ...processes import run_python
from .test_narrow_weights import kept_float8
from .test_small_gemm_triton import FORMS as FEW_ROWS_FORMS
from .test_small_gemm_triton import TOLERANCE, Case, Inputs, narrow, numbers_of

#: Bits, inputs of a group or 0 for a row, and what else they have: see `narrow`.
FORMS = (*FEW_ROWS_FORMS, (4, 32, "mxfp4"))

#: (inputs, outputs): within a block of either, of one, and of several with a rest.
SHAPES = (64, 50), (128, 64), (200, 33), (576, 80), (384, 130)

#: Within each tile, at its end, and of several tiles.
ROWS = 1, 16, 19, 64, 100, 128, 129, 300

#: Largest difference from the sum in float64 in units in the last place, of a number that is at least a sixteenth of
#: the largest: half a unit for the one rounding, and a hundredth for sums in float32.
UNITS = 0.51


def has_form(form: tuple[int, int, str], inputs: int) -> bool:
    """Whether a weight with so many inputs may be kept in a form."""
    return inputs % 32 == 0 if form[2] == "mxfp4" else is_kept(inputs, form[0], form[1] or inputs)


def check_values(case: Case, form: tuple[int, int, str], dtype: torch.dtype, device: str = "cpu") -> str:
    """Text that names how a product differs from that of the numbers that the weight stands for; else empty."""
    from chorus.ops.gemm.swapped_gemm_triton import multiply

    inputs, weight = Inputs(case, dtype, device), narrow(case, form, dtype, device)
    got = multiply(inputs.x, weight, inputs.bias)
    want = inputs.x.double() @ numbers_of(weight).T + (0 if inputs.bias is None else inputs.bias.double())
    if got.dtype is not dtype or got.shape != want.shape:
        return f"is {got.dtype} {tuple(got.shape)}"
    if dtype is torch.float32:
        error = float((got - want).abs().max() / want.abs().max())
        return "" if error <= TOLERANCE[dtype] else f"differs by {error:.1e} of the largest output"
    unit = torch.finfo(dtype).eps * torch.maximum(want.abs(), want.abs().max() / 16)
    worst = float(((got.double() - want).abs() / unit).max())
    return "" if worst <= UNITS else f"is {worst:.2f} units in the last place from the sum of the stored numbers"


def interpret_values() -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    rows = itertools.cycle(ROWS)
    for seed, (shape, form, dtype) in enumerate(itertools.product(SHAPES, FORMS, TOLERANCE)):
        if has_form(form, shape[0]):
            case = Case(seed, next(rows), shape, bias=bool(seed & 1), silu=False, spare=seed % 3)
            problem = check_values(case, form, dtype)
            assert not problem, f"{case}, {form}, {dtype}: {problem}"


def interpret_float8_numbers() -> None:
    """Run in a process of its own: rows of a single 1 give every finite E4M3 number, subnormal ones, too."""
    from chorus.ops.gemm.swapped_gemm_triton import multiply

    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    for dtype in (torch.bfloat16, torch.float16):
        weight, want = kept_float8(24, 256, 128, dtype)
        assert torch.equal(multiply(torch.eye(256, dtype=dtype), weight), want.T)


def interpret_bits() -> None:
    """Run in a process of its own: each row of steps of 1 to 256 rows has the bits that it has in the largest, also in
    reversed order and beside rows that are not finite.
    """
    from chorus.ops.gemm.swapped_gemm_triton import multiply

    from ..bf16_interpreter import fix_bf16, multiply_column_by_column

    fix_bf16()
    multiply_column_by_column()
    for seed, form in enumerate(((4, 64, ""), (8, 128, "zeros"), (8, 0, "fp8"), (4, 32, "mxfp4"))):
        case = Case(seed, 256, (384, 66), bias=True, silu=False)
        inputs, weight = Inputs(case, torch.bfloat16), narrow(case, form, torch.bfloat16)
        whole = multiply(inputs.x, weight, inputs.bias)
        for rows in range(1, 257) if not seed else (1, 16, 17, 33, 65, 129, 255):
            got = multiply(inputs.x[:rows], weight, inputs.bias)
            assert torch.equal(got, whole[:rows]), f"{form}: {rows} rows have other bits"
        backwards = inputs.x.flip(0).contiguous()
        assert torch.equal(multiply(backwards[:100], weight, inputs.bias), whole.flip(0)[:100]), form
        broken = inputs.x[:40].clone()
        broken[7, 3] = torch.nan
        got = multiply(broken, weight, inputs.bias)
        assert got[7].isnan().all()
        others = [row for row in range(40) if row != 7]
        assert torch.equal(got[others], whole[:40][others]), f"{form}: another row changed"


@pytest.mark.triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("work", ["interpret_values", "interpret_float8_numbers", "interpret_bits"])
def test_interpreted(work):
    command = f"from tests.ops.gemm.test_swapped_gemm import *; {work}()"
    result = run_python("-c", command, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "form",
    [
        WeightForm(4, 128, zeros=True),
        WeightForm(4, 64),
        WeightForm(8),
        WeightForm(8, 128),
        WeightForm(4, 32, float4=True),
    ],
)
def test_inputs_are_summed_alike_in_tiles_of_all_sizes(form):
    made = [swapped_constants(4096, 6144, tile_of(rows, form), form) for rows in range(1, 300)]
    assert len({(each.block_k, each.blocks, each.splits, each.groups) for each in made}) == 1
    if not form.float4:
        assert not form.group % (made[0].block_k * made[0].blocks), "blocks that are added first have one scale"
    assert {each.block_t for each in made} == set(TILE_ROWS[:3] if form.group and not form.float4 else TILE_ROWS)
    assert all(each.block_t >= rows for rows, each in enumerate(made[:64], 1))


@pytest.mark.triton
def test_refuses_what_it_does_not_multiply():
    from chorus.ops.gemm.swapped_gemm_triton import multiply

    weight = narrow(Case(0, 2, (64, 32), bias=False, silu=False), (8, 0, ""), torch.bfloat16)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert multiply(x[:0], weight).shape == (0, 32)
    with pytest.raises(ValueError, match="must be contiguous"):
        multiply(x.T.contiguous().T, weight)
    with pytest.raises(ValueError, match="must be contiguous"):
        multiply(x[:, :32], replace(weight, data=weight.data[:, :32]))
    from chorus.ops.gemm import small_gemm_triton

    numbers, powers = torch.zeros(32, 64, dtype=torch.int8), torch.ones(32, 2)
    float4 = keep_float4(numbers, powers, dtype=torch.bfloat16, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="takes no MXFP4; swapped_gemm_triton does"):
        small_gemm_triton.multiply(x, float4)


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_compiles_for_a_gpu_that_is_not_there(arch):
    command = (
        "-m",
        "chorus.perf.kernels",
        "--compile",
        arch,
        "--only",
        "multiply_swapped .*(int|mxfp4)",
        "--workers",
        "1",
    )
    result = run_python(*command)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in json.loads(result.stdout.splitlines()[-1])["compile"]:
        assert line["matrix"]
        assert not line["spill_bytes"]
