"""Products of experts with narrow weights as the first operand: values in Triton's interpreter against float64, and
bits of rows in steps of all sizes.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.ops.elementwise.elementwise_schedule import Gating
from chorus.ops.elementwise.elementwise_triton import gate_and_mul
from chorus.ops.gemm.narrow_weights import NarrowWeight
from chorus.ops.gemm.small_gemm_schedule import WeightForm
from chorus.ops.moe.expert_tiles import Stack
from chorus.ops.moe.expert_tiles_schedule import TILE_COLUMNS, TILE_ROWS, Gate, swapped, tile_constants
from chorus.ops.moe.expert_tiles_triton import multiply
from chorus.ops.moe.routing_triton import tiles_of

from .expert_cases import NARROW, WIDE, chosen_experts, narrow_stack
from .swapped_cases import check_bits, check_values, check_wide
from .test_expert_tiles_interpreted import GATES


@pytest.fixture(scope="module", autouse=True)
def exact():
    from ..bf16_interpreter import fix_bf16, multiply_column_by_column

    fix_bf16()
    multiply_column_by_column()


@pytest.fixture(autouse=True)
def no_dense(monkeypatch):
    """No product widens a weight in memory."""

    def refuse(weight: NarrowWeight) -> torch.Tensor:
        raise AssertionError("a weight was widened")

    monkeypatch.setattr(NarrowWeight, "dense", refuse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "inputs", "group"), NARROW)
def test_values(form, inputs, group, dtype):
    check_values(form, inputs, group, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(("form", "group"), [("int4 zeros", 128), ("int8", 256), ("fp8", 128), ("mxfp4", 32)])
def test_an_activation_in_the_launch_has_the_bits_of_that_behind_it(name, form, group, dtype):
    """Of columns that end within a program's, and of several programs."""
    gate, chosen = GATES[name][0], chosen_experts(5, 4, 2)
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(-4, 5, (5, 256), generator=generator).to(dtype)  # sums of whole numbers are exact in any order
    for outputs in (22, 100):
        stack = Stack(narrow_stack(form, 4, 2 * outputs, 256, group, dtype))
        if form == "mxfp4":
            stack = Stack(replace(stack.data, scales=stack.data.scales.clamp(124, 127)))
        tiles = tiles_of(chosen, 4)
        found, apart = multiply(x, stack, tiles, 2, gate, swaps=True), multiply(x, stack, tiles, 2, swaps=True)
        assert found.shape == (10, outputs)
        assert torch.equal(found, gate_and_mul(apart, *gate))


@pytest.mark.parametrize(("form", "group"), [("int4 zeros", 128), ("int8", 256), ("fp8", 64), ("mxfp4", 32)])
def test_a_rows_bits_are_the_same_in_steps_of_all_sizes(form, group):
    check_bits(form, group, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "inputs", "group"), WIDE)
def test_wide_tiles_give_the_same_bits(form, inputs, group, dtype):
    check_wide(form, inputs, group, dtype, "cpu")


def test_plain_experts_have_no_operands_to_swap():
    """A stack of another form beside a narrow one goes its own way."""
    generator, chosen = torch.Generator().manual_seed(3), chosen_experts(5, 3, 2)
    weight, x = torch.randn(3, 20, 40, generator=generator), torch.randn(5, 40, generator=generator)
    found, want = (
        multiply(x, Stack(weight), tiles_of(chosen, 3), 2, Gate(Gating.SILU), swaps=it) for it in (True, False)
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize("form", [WeightForm(4, 128, zeros=True), WeightForm(8), WeightForm(4, 32, float4=True)])
def test_inputs_are_summed_alike_in_tiles_of_all_sizes(form):
    numbers = {"per_row": 8, "experts": 128, "bias": False, "form": form}
    made = [
        swapped(tile_constants(2048, 768, block_t, 2, **numbers, is_wide=it), form, is_wide=it)
        for block_t in TILE_ROWS
        for it in (False, True)
    ]
    assert {each.block_n for each in made} == {64, *TILE_COLUMNS}
    assert len({(each.block_k, each.blocks, each.splits, each.groups) for each in made}) == 1
