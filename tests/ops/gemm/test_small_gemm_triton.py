"""The product of few rows without a GPU: values in Triton's interpreter against its definition, bits of rows in other
company, and an offline compile; a process for each.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorus.ops.elementwise.elementwise import silu_and_mul
from chorus.ops.gemm.narrow_weights import NarrowWeight, is_kept, keep, keep_float4
from chorus.ops.gemm.small_gemm_schedule import (
    MAX_ROWS,
    TILE_ROWS,
    fewest_rows,
    gemm_constants,
    gemm_schedule,
    tile_rows,
)
from chorus.ops.lora.sgmv_schedule import ExpandShape

from ...processes import run_python
from .test_narrow_weights import kept_float8

#: Largest difference, as a share of the largest output: two units in its last place.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}

#: (inputs, outputs): within a part, within a period of parts, beyond it, and of many programs.
SHAPES = ((8, 16), (40, 24), (64, 50), (200, 33), (256, 64), (264, 18), (576, 40), (160, 34))


@dataclass(frozen=True)
class Case:
    """Random values of a launch. spare: columns after every row of x. scale: power of ten of the values."""

    seed: int
    rows: int
    shape: tuple[int, int]
    bias: bool
    silu: bool
    spare: int = 0
    scale: int = 0


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` launches that go through all shapes, with and without bias and activation."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        draw = torch.randint(0, 1 << 30, (4,), generator=generator).tolist()
        yield Case(
            draw[0],
            (1, 17, 5, 64, 16, 33, 3, 32, 48)[draw[1] % 9],
            SHAPES[index % len(SHAPES)],
            bool(draw[2] & 1),
            bool(index & 1),
            (0, 3, 16)[draw[3] % 3],
            (0, -2, 1)[draw[2] % 3],
        )


class Inputs:
    """Random tensors of a case, drawn on its device: a host takes seconds for a large model's weight. A weight's rows
    are about as long as those of a model.
    """

    def __init__(self, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
        generator = torch.Generator(device).manual_seed(case.seed)
        d_in, d_out = case.shape

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        outputs = 2 * d_out if case.silu else d_out
        scale = 10.0**case.scale
        self.x = (draw(case.rows, d_in + case.spare) * scale).to(dtype)[:, :d_in]
        self.weight: torch.Tensor | NarrowWeight = (draw(outputs, d_in) / d_in**0.5).to(dtype)
        self.bias = (draw(outputs) * scale).to(dtype) if case.bias else None


def product(
    x: torch.Tensor, weight: torch.Tensor | NarrowWeight, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """Definition, on the CPU: summed in float64, rounded where the kernel rounds."""
    weight = weight.dense() if isinstance(weight, NarrowWeight) else weight
    y = x.double() @ weight.double().T
    y = (y if bias is None else y + bias.double()).to(x.dtype).cpu()
    return silu_and_mul(y) if silu else y


def run(
    case: Case, inputs: Inputs, rows: slice | list[int] = slice(None), *, compile_only: bool = False
) -> torch.Tensor:
    """The product of some of a case's rows by the kernel, on the CPU again. compile_only: nothing is computed."""
    from chorus.ops.gemm import small_gemm_triton

    x, weight, bias = inputs.x[rows], inputs.weight, inputs.bias
    return small_gemm_triton.multiply(x, weight, bias, silu=case.silu, compile_only=compile_only).cpu()


def check(case: Case, dtype: torch.dtype, device: str) -> str:
    """Text that names the errors; empty if there are none."""
    inputs = Inputs(case, dtype, device)
    got = run(case, inputs)
    return _differs(got, product(inputs.x, inputs.weight, inputs.bias, case.silu), dtype)


def check_company(case: Case, dtype: torch.dtype, device: str) -> str:
    """A row's bits alone, elsewhere, among fewer that the same tile holds, with the activation after the launch."""
    inputs = Inputs(case, dtype, device)
    whole = run(case, inputs)
    order, least = list(range(case.rows))[::-1], fewest_rows(case.rows)
    for chosen in (order, order[: max(case.rows // 2 + 1, least)], order[:1] * least):
        if not torch.equal(run(case, inputs, chosen), whole[chosen]):
            return f"rows {chosen} of {case.rows} have other bits"
    if case.silu:
        from chorus.ops.elementwise import elementwise_triton

        gate_up = run(replace(case, silu=False), inputs)
        if not torch.equal(elementwise_triton.silu_and_mul(gate_up.to(device)).cpu(), whole):
            return "the activation in the launch has other bits than behind it"
    return ""


def check_broken_row(case: Case, device: str) -> str:
    """A value that is not finite stays in its row."""
    inputs = Inputs(case, torch.bfloat16, device)
    whole = run(case, inputs)
    broken = case.seed % case.rows
    inputs.x = inputs.x.clone()
    inputs.x[broken, case.seed % case.shape[0]] = (math.nan, math.inf)[case.seed % 2]
    got = run(case, inputs)
    others = [row for row in range(case.rows) if row != broken]
    if not torch.equal(got[others], whole[others]):
        return "another row changed"
    return "" if not got[broken].isfinite().any() or case.silu else "the broken row is finite"


def _differs(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> str:
    if got.dtype is not dtype or got.shape != want.shape:
        return f"is {got.dtype} {tuple(got.shape)}, not {dtype} {tuple(want.shape)}"
    largest = max(float(want.float().abs().max()), torch.finfo(torch.float16).tiny)
    error = float((got.float() - want.float()).abs().max()) / largest
    return "" if error <= TOLERANCE[dtype] else f"differs by {error:.1e} of the largest output"


launches = st.builds(
    Case,
    seed=st.integers(0, 2**31),
    rows=st.integers(1, MAX_ROWS),
    shape=st.sampled_from(SHAPES) | st.tuples(st.integers(1, 300), st.integers(1, 70)),
    bias=st.booleans(),
    silu=st.booleans(),
    spare=st.integers(0, 5),
    scale=st.integers(-2, 1),
)


def interpret() -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=launches, dtype=st.sampled_from(list(TOLERANCE)))
    def equals_its_definition(case: Case, dtype: torch.dtype) -> None:
        problem = check(case, dtype, "cpu")
        assert not problem, problem

    equals_its_definition()
    for case in cases(1, 16):
        for dtype in TOLERANCE:
            problem = check(case, dtype, "cpu")
            assert not problem, f"{case}: {problem}"


def interpret_companies() -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16, multiply_row_by_row

    fix_bf16()
    multiply_row_by_row()
    for case in cases(2, 16):
        problem = check_company(case, torch.bfloat16, "cpu") or check_broken_row(case, "cpu")
        assert not problem, f"{case}: {problem}"


@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_values_equal_the_definition():
    result = run_python("-m", "tests.ops.gemm.test_small_gemm_triton", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


def narrow(case: Case, form: tuple[int, int, str], dtype: torch.dtype, device: str = "cpu") -> NarrowWeight:
    """Random values as a case's weight. form: bits, inputs of a group or 0 for a row, and whether they have zero points
    or are FP8 or MXFP4.
    """
    bits, group, kind = form
    d_in, d_out = case.shape
    rows, half = d_out * (1 + case.silu), 1 << (bits - 1)
    generator = torch.Generator().manual_seed(case.seed)
    group = group or d_in
    values = torch.randint(-half, half, (rows, d_in), generator=generator, dtype=torch.int8)
    if kind == "mxfp4":
        doubles = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)[values.long() % 8] * values.sign()
        powers = torch.exp2(torch.randint(-8, 2, (rows, d_in // group), generator=generator).float())
        return keep_float4(doubles, powers, dtype=dtype, device=torch.device(device))
    scales = (torch.rand(rows, -(-d_in // group), generator=generator) + 0.1) / (half * d_in**0.5)
    points = torch.randint(-half, half, scales.shape, generator=generator, dtype=torch.int16)
    points = points if kind == "zeros" else None
    values = values.to(torch.float8_e4m3fn) if kind == "fp8" else values
    return keep(values, scales, points, bits=bits, group=group, dtype=dtype, device=torch.device(device))


FORMS = ((8, 0, ""), (8, 128, "zeros"), (4, 64, ""), (4, 128, "zeros"), (4, 0, "zeros"), (8, 0, "fp8"), (8, 128, "fp8"))


def numbers_of(weight: NarrowWeight) -> torch.Tensor:
    """What a weight's stored numbers, zero points and scales stand for, in float64, by its definition."""
    if weight.float4:  # float32 holds them exactly
        return replace(weight, dtype=torch.float32).dense().double()
    one = replace(weight, scales=torch.ones_like(weight.scales), dtype=torch.float32)
    group_of = torch.arange(weight.shape[1], device=weight.device) // weight.group
    return one.dense().double() * weight.scales.double()[:, group_of]


def check_form(case: Case, form: tuple[int, int, str], dtype: torch.dtype, device: str) -> str:
    """Text that names how a product with a narrow weight differs from one with the numbers that it stands for, of which
    only the result is rounded.
    """
    inputs, weight = Inputs(case, dtype, device), narrow(case, form, dtype, device)
    inputs.weight = weight
    want = product(inputs.x, numbers_of(weight), inputs.bias, case.silu)
    got = run(case, inputs)
    if error := _differs(got, want, dtype):
        return error
    if not case.silu and dtype is not torch.float32:
        exact = inputs.x.double() @ numbers_of(weight).T + (0 if inputs.bias is None else inputs.bias.double())
        exact = exact.cpu()
        unit = torch.finfo(dtype).eps * torch.maximum(exact.abs(), exact.abs().max() / 16)
        worst = float(((got.double() - exact).abs() / unit).max())
        return "" if worst <= 0.51 else f"is {worst:.2f} units in the last place from the sum of the stored numbers"
    return ""


def check_float8_numbers(dtype: torch.dtype, device: str) -> str:
    """Text that tells if a product with rows of a single 1 differs from the weight, which has every finite E4M3 number,
    subnormal ones, too; in tiles of both sizes.
    """
    from chorus.ops.gemm import small_gemm_triton

    weight, want = kept_float8(24, 256, 128, dtype)
    ones = torch.eye(256, dtype=dtype, device=device)
    weight = replace(weight, data=weight.data.to(device), scales=weight.scales.to(device))
    for rows in TILE_ROWS:
        for first in range(0, 256, rows):
            got = small_gemm_triton.multiply(ones[first : first + rows], weight).cpu()
            if not torch.equal(got, want[:, first : first + rows].T):
                return f"inputs from {first} on have other numbers in {rows} rows"
    return ""


def interpret_forms() -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    for case, form in itertools.product(cases(3, 14), FORMS):
        if is_kept(case.shape[0], form[0], form[1] or case.shape[0]):
            for dtype in (torch.bfloat16, torch.float16):
                problem = check_form(case, form, dtype, "cpu")
                assert not problem, f"{case}, {form}: {problem}"
    for dtype in (torch.bfloat16, torch.float16):
        problem = check_float8_numbers(dtype, "cpu")
        assert not problem, f"{dtype}: {problem}"


@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_a_product_with_a_narrow_weight_is_that_of_its_stored_numbers():
    command = "from tests.ops.gemm.test_small_gemm_triton import *; interpret_forms()"
    result = run_python("-c", command, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_bits_of_a_row_do_not_depend_on_its_company():
    command = "from tests.ops.gemm.test_small_gemm_triton import *; interpret_companies()"
    result = run_python("-c", command, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_sum_is_cut_by_the_weight_alone():
    """Whatever is joined to a product, its parts and their order are the same."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for tokens, outputs in itertools.product((1, 16, 17, 64), (16, 4096, 128256)):
        shape = ExpandShape((0,), (outputs,), 16, 1 << 20, 2, 16, 2, 1)
        for silu, of in itertools.product((False, True), (None, shape)):
            schedule = gemm_schedule(outputs, tokens, expanded=of is not None)
            each = gemm_constants(schedule, 4096, outputs, silu=silu, shape=of)
            assert each.block_t == tile_rows(tokens) >= tokens
            found.setdefault(each.block_t, set()).add((each.block_k, each.splits))
    assert found == {16: {(128, 4)}, 64: {(128, 1)}}, "the kernel adds four parts, or has one"


def test_a_tile_holds_the_rows_from_its_fewest_to_its_own():
    for rows in range(1, MAX_ROWS + 1):
        assert fewest_rows(rows) <= rows <= tile_rows(rows) in TILE_ROWS
        assert {tile_rows(each) for each in range(fewest_rows(rows), rows + 1)} == {tile_rows(rows)}
    assert [fewest_rows(rows) for rows in (1, 16, 17, 64)] == [1, 1, 17, 17]


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_compiles_for_a_gpu_that_is_not_there():
    result = run_python(
        "-m",
        "chorus.perf.kernels",
        "--compile",
        "sm_90",
        "--only",
        r"multiply_rows (base\.o|lora256\.(mlp|o)|many\.(o|mlp)|multi256\.mlp)",
        "--workers",
        "1",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert {line["group"]: line["matrix"] for line in lines} == {
        **dict.fromkeys(("base.o", "lora256.mlp", "lora256.o"), "mma.m16n8k16"),
        **dict.fromkeys(("many.o", "many.mlp"), "wgmma.m64n32k16"),
        "multi256.mlp": "wgmma.m64n8k16",
    }
    for line in lines:
        assert not line["spill_bytes"]
        assert line["loads_before"] == 0, "weights wait for no load"


def rank_rows_loads() -> None:
    """Run in a process of its own: rank-rows of adapters that are expanded in a launch wait for two loads."""
    from chorus.perf.kernels.variants import Variant, job_of

    for group, rows in (("lora256.o", 16), ("multi256.o", 32)):
        job = job_of(Variant("multiply_rows", group, "bf16", rows), "sm_90")
        assert replace(job, pointer="arena").compile().loads_before == 2, group


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_rank_rows_wait_for_two_loads():
    result = run_python("-c", "from tests.ops.gemm.test_small_gemm_triton import *; rank_rows_loads()")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.triton
def test_refuses_what_a_tile_does_not_hold():
    from chorus.ops.gemm.small_gemm_triton import multiply

    with pytest.raises(ValueError, match=f"65 rows; this GEMM takes at most {MAX_ROWS}"):
        multiply(torch.zeros(65, 8), torch.zeros(16, 8))
    with pytest.raises(ValueError, match="the whole weight must be contiguous"):
        multiply(torch.zeros(2, 8), torch.zeros(16, 16)[:, :8])


if __name__ == "__main__":
    interpret()
