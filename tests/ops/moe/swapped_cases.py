"""Checks of experts' products in wide tiles, and with narrow weights first: interpreted, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from chorus.ops.gemm.narrow_weights import NarrowWeight
from chorus.ops.moe.expert_tiles import ExpertTiles, Stack
from chorus.ops.moe.expert_tiles_schedule import TILE_ROWS, Gate

from ..gemm.test_swapped_gemm import UNITS
from .expert_cases import chosen_experts, narrow_stack

#: Largest difference of float32, as a share of the largest output.
TOLERANCE = 1e-5

_DENSE = NarrowWeight.dense


def numbers_of(weight: NarrowWeight) -> torch.Tensor:
    """What the stored numbers stand for, in float64."""
    return _DENSE(replace(weight, dtype=torch.float32)).double()


def _check(found: torch.Tensor, want: torch.Tensor) -> None:
    """want: in float64."""
    if found.dtype is torch.float32:
        assert (found - want).abs().max() <= TOLERANCE * want.abs().max()
    else:
        unit = torch.finfo(found.dtype).eps * torch.maximum(want.abs(), want.abs().max() / 16)
        assert ((found.double() - want).abs() / unit).max() <= UNITS


def check_values(form: str, inputs: int, group: int, dtype: torch.dtype, device: str) -> None:
    """Of rows that go to several experts, with biases, in tiles of each size, of few rows unsorted, too."""
    from chorus.ops.moe.expert_tiles_triton import multiply
    from chorus.ops.moe.routing_triton import tiles_of

    generator, outputs = torch.Generator().manual_seed(1), 70
    weight = narrow_stack(form, 3, outputs, inputs, group, dtype, device)
    if form == "mxfp4":
        weight = replace(weight, scales=weight.scales.clamp(110, 130))  # powers of 2 that float16 has, too
    biases, numbers = torch.randn(3, outputs, generator=generator).to(device, dtype), numbers_of(weight)
    for rows in (3, 20, 70, 150):
        chosen = chosen_experts(rows, 3, 2, seed=rows).to(device)
        x = torch.randn(rows, inputs + 3, generator=generator).to(device, dtype)[:, :inputs]
        tiles = ExpertTiles.unsorted(chosen.contiguous()) if rows == 3 else tiles_of(chosen, 3, Stack(weight))
        found, of_pair = multiply(x, Stack(weight, biases), tiles, 2, swaps=True), chosen.flatten()
        want = torch.einsum("pi,poi->po", x.double().repeat_interleave(2, 0), numbers[of_pair])
        _check(found, want + biases.double()[of_pair])


def check_bits(form: str, group: int, device: str) -> None:
    """Of rows in tiles of 16 and of 64 rows, of MXFP4 of 128, too, unsorted, and backwards."""
    from chorus.ops.moe.expert_tiles_triton import multiply
    from chorus.ops.moe.routing_triton import tiles_of

    generator = torch.Generator().manual_seed(2)
    weight = narrow_stack(form, 2, 66, 256, group, torch.bfloat16, device)
    chosen, stack = chosen_experts(200, 2, 1).to(device), Stack(weight)
    x = torch.randn(200, 256, generator=generator).to(device, torch.bfloat16)
    sizes, whole = set(), multiply(x, stack, tiles_of(chosen, 2, stack), 1, swaps=True)
    for rows in (1, 2, 4, 16, 17, 33, 64, 65, 129, 199, 200):
        tiles = tiles_of(chosen[:rows], 2, stack)
        sizes.add(tiles.block_t)
        assert torch.equal(multiply(x[:rows], stack, tiles, 1, swaps=True), whole[:rows]), rows
    assert sizes == set(TILE_ROWS if form == "mxfp4" else TILE_ROWS[:2])
    apart = multiply(x[:4], stack, ExpertTiles.unsorted(chosen[:4].contiguous()), 1, swaps=True)
    assert torch.equal(apart, whole[:4])
    backwards = multiply(x.flip(0).contiguous(), stack, tiles_of(chosen.flip(0).contiguous(), 2, stack), 1, swaps=True)
    assert torch.equal(backwards, whole.flip(0))


def check_wide(form: str, inputs: int, group: int, dtype: torch.dtype, device: str) -> None:
    """Of tiles of 64 rows with 256 columns, and of 128 rows: values, and the bits of tiles of 128 columns. form: of
    `NARROW`, or `plain`.
    """
    from chorus.ops.moe.expert_tiles_triton import multiply
    from chorus.ops.moe.routing_triton import tiles_of

    generator, outputs = torch.Generator().manual_seed(8), 300
    if form == "plain":
        weight = (torch.randn(2, outputs, inputs, generator=generator) / inputs**0.5).to(device, dtype)
        numbers = weight.double()
    else:
        weight = narrow_stack(form, 2, outputs, inputs, group, dtype, device)
        if form == "mxfp4":
            weight = replace(weight, scales=weight.scales.clamp(110, 130))
        numbers = numbers_of(weight)
    biases, sizes = torch.randn(2, outputs, generator=generator).to(device, dtype), set()
    stack, swaps = Stack(weight, biases), form != "plain"
    for rows in (70, 200):
        chosen = chosen_experts(rows, 2, 1, seed=rows).to(device)
        x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
        tiles, of_pair = tiles_of(chosen, 2, stack), chosen.flatten()
        found, narrower = (multiply(x, stack, tiles, 1, swaps=swaps, is_wide=it) for it in (True, False))
        sizes.add(tiles.block_t)
        _check(found, torch.einsum("pi,poi->po", x.double(), numbers[of_pair]) + biases.double()[of_pair])
        assert torch.equal(found, narrower), rows
        gated, apart = (multiply(x, stack, tiles, 1, Gate(), swaps=swaps, is_wide=it) for it in (True, False))
        assert torch.equal(gated, apart), rows
    assert sizes == set(TILE_ROWS[1:] if form in ("plain", "mxfp4") else TILE_ROWS[1:2])
