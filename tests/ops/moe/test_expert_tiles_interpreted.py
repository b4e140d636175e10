"""Products of experts by tiles: values in Triton's interpreter against float64, and bits of rows in other company.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from chorus.ops.elementwise.elementwise import clamped_swiglu, gelu_and_mul, silu_and_mul
from chorus.ops.elementwise.elementwise_schedule import Gating
from chorus.ops.elementwise.elementwise_triton import gate_and_mul
from chorus.ops.moe.expert_tiles import ExpertTiles, Stack
from chorus.ops.moe.expert_tiles_schedule import Gate, num_tiles
from chorus.ops.moe.expert_tiles_triton import multiply
from chorus.ops.moe.routing_triton import tiles_of

from .expert_cases import NARROW, chosen_experts, narrow_stack

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}

#: (rows, experts, experts of a row, inputs, outputs): one row; more experts than pairs; tiles of 64 rows; of 128; all
#: experts.
SHAPES = [(1, 8, 2, 64, 40), (5, 16, 4, 40, 50), (70, 4, 2, 72, 33), (200, 6, 3, 16, 64), (9, 3, 3, 130, 20)]


@pytest.fixture(scope="module", autouse=True)
def exact():
    from ..bf16_interpreter import fix_bf16, multiply_row_by_row

    fix_bf16()
    multiply_row_by_row()


@pytest.mark.parametrize(("rows", "experts", "each"), [shape[:3] for shape in SHAPES] + [(64, 4, 1), (65, 4, 1)])
@pytest.mark.parametrize("skewed", [False, True])
def test_every_pair_is_in_one_tile_of_its_expert(rows, experts, each, skewed):
    """Of tiles by torch; for those of base products see `test_routing_interpreted`."""
    chosen = torch.arange(each).expand(rows, each) if skewed else chosen_experts(rows, experts, each)
    tiles = ExpertTiles.of(chosen.contiguous(), experts, 16 if rows < 64 else 64)
    assert len(tiles.expert) == num_tiles(rows * each, experts, tiles.block_t)
    seen = []
    for expert, first, end in zip(tiles.expert.tolist(), tiles.first.tolist(), tiles.end.tolist(), strict=True):
        assert 0 <= end - first <= tiles.block_t
        pairs = tiles.pairs[first:end].tolist()
        assert {int(chosen.flatten()[pair]) for pair in pairs} <= {expert}
        seen += pairs
    assert sorted(seen) == list(range(rows * each))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_values_of_both_products(shape, dtype, bias):
    """Of rows that go to several experts, and of rows that each go to one."""
    rows, experts, each, inputs, outputs = shape
    generator, chosen = torch.Generator().manual_seed(1), chosen_experts(rows, experts, each)
    weight = (torch.randn(experts, outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    biases = torch.randn(experts, outputs, generator=generator).to(dtype) if bias else None
    tiles, of_pair = tiles_of(chosen, experts), chosen.flatten()
    for count, per_row in ((rows, each), (rows * each, 1)):
        x = torch.randn(count, inputs + 3, generator=generator).to(dtype)[:, :inputs]
        found = multiply(x, Stack(weight, biases), tiles, per_row)
        of_row = x.double().repeat_interleave(per_row, 0)
        want = torch.einsum("pi,poi->po", of_row, weight.double()[of_pair])
        want += 0 if biases is None else biases.double()[of_pair]
        assert (found.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("rows", [12, 150])
def test_a_rows_bits_do_not_depend_on_its_company(rows):
    generator, chosen = torch.Generator().manual_seed(2), chosen_experts(rows, 6, 2)
    weight, x = torch.randn(6, 40, 100, generator=generator), torch.randn(rows, 100, generator=generator)
    whole = multiply(x, Stack(weight), tiles_of(chosen, 6), 2).view(rows, 2, -1)
    fewer = list(range(rows))[:: -1 if rows < 64 else -2]
    found = multiply(x[fewer], Stack(weight), tiles_of(chosen[fewer], 6), 2).view(len(fewer), 2, -1)
    assert torch.equal(found, whole[fewer])
    if rows < 64:
        alone = multiply(x[7:8], Stack(weight), tiles_of(chosen[7:8], 6), 2)
        assert torch.equal(alone, whole[7])


GATES = {
    "silu": (Gate(), silu_and_mul),
    "gelu": (Gate(Gating.GELU), gelu_and_mul),
    "swiglu": (Gate(Gating.CLAMPED_SWIGLU, 1.702, 7.0), partial(clamped_swiglu, alpha=1.702, limit=7.0)),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8, 2, 64, 20), (5, 16, 4, 40, 33), (70, 4, 2, 72, 70)])
@pytest.mark.parametrize("name", GATES)
def test_an_activation_in_the_launch_is_that_of_the_rounded_products(name, shape, dtype):
    """Bit for bit as the kernel of the activation computes it, and close to float64."""
    rows, experts, each, inputs, outputs = shape
    gate, torchs = GATES[name]
    generator, chosen = torch.Generator().manual_seed(5), chosen_experts(rows, experts, each)
    # sums of whole numbers are exact in any order
    weight = torch.randint(-4, 5, (experts, 2 * outputs, inputs), generator=generator).to(dtype)
    biases = torch.randint(-4, 5, (experts, 2 * outputs), generator=generator).to(dtype)
    x = torch.randint(-4, 5, (rows, inputs), generator=generator).to(dtype) / 8
    tiles, stack = tiles_of(chosen, experts), Stack(weight, biases)
    found, apart = multiply(x, stack, tiles, each, gate), multiply(x, stack, tiles, each)
    assert found.shape == (rows * each, outputs)
    assert torch.equal(found, gate_and_mul(apart, *gate))
    of_pair = chosen.flatten()
    products = torch.einsum("pi,poi->po", x.double().repeat_interleave(each, 0), weight.double()[of_pair])
    want = torchs((products + biases.double()[of_pair]).to(dtype).double())
    assert (found.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("form", ["int4 zeros", "fp8", "mxfp4"])
def test_an_activation_in_the_launch_of_narrow_experts_is_that_behind_it(form):
    x, chosen = torch.randn(5, 256, generator=torch.Generator().manual_seed(6)).bfloat16(), chosen_experts(5, 4, 2)
    stack = Stack(narrow_stack(form, 4, 72, 256, 32 if form == "mxfp4" else 128, torch.bfloat16))
    tiles = tiles_of(chosen, 4)
    found, apart = multiply(x, stack, tiles, 2, Gate()), gate_and_mul(multiply(x, stack, tiles, 2), Gating.SILU)
    assert (found.double() - apart.double()).abs().max() <= 2.0**-6 * apart.double().abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "gate"), [(1, None), (4, Gate()), (4, None)])
def test_pairs_that_are_not_sorted_have_the_bits_of_sorted_ones(rows, gate, dtype):
    """Two rows go to the same expert among others."""
    generator, chosen = torch.Generator().manual_seed(7), torch.tensor([[3, 1], [1, 0], [2, 3], [0, 2]])[:rows]
    weight = torch.randn(4, 40, 100, generator=generator).to(dtype)
    x, stack = torch.randn(rows, 100, generator=generator).to(dtype), Stack(weight, weight[:, :, 0].contiguous())
    tiles = ExpertTiles.unsorted(chosen)
    assert len(tiles.expert) == 2 * rows
    assert torch.equal(multiply(x, stack, tiles, 2, gate), multiply(x, stack, tiles_of(chosen, 4), 2, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "inputs", "group"), NARROW)
def test_narrow_experts_are_multiplied_as_the_numbers_that_they_stand_for(form, inputs, group, dtype):
    """Of rows with a single 1, the result is a column of a weight, bit by bit; in tiles of 16 rows and of 64."""
    generator, outputs = torch.Generator().manual_seed(4), 41
    weight = narrow_stack(form, 4, outputs, inputs, group, dtype)
    dense, ones = weight.dense(), torch.eye(inputs, dtype=dtype)
    assert dense.isfinite().all() and dense.count_nonzero() > dense.numel() / 2
    for at in (torch.arange(0, inputs, 7)[:40], torch.arange(65) * 37 % inputs):
        chosen = chosen_experts(len(at), 4, 2)
        found = multiply(ones[at], Stack(weight), tiles_of(chosen, 4), 2)
        assert torch.equal(found, dense[chosen.flatten(), :, at.repeat_interleave(2)])
    biases, chosen = torch.randn(4, outputs, generator=generator).to(dtype), chosen_experts(5, 4, 2)
    x, tiles = torch.randn(5, inputs, generator=generator).to(dtype), tiles_of(chosen, 4)
    found, want = (multiply(x, Stack(each, biases), tiles, 2).double() for each in (weight, dense))
    assert (found - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
