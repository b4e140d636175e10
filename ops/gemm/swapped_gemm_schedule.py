"""Schedule of a GEMM whose narrow weights are the first operand of the matrix instruction.

Tests: tests/ops/gemm/test_swapped_gemm.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .small_gemm_schedule import WeightForm

#: Rows of x that a program multiplies its weights with; steps of more have several tiles.
TILE_ROWS = 16, 32, 64, 128

#: Inputs that are multiplied at once, and how many such blocks have one scale where groups have it.
BLOCK_K, _BLOCKS = 64, 2


class Tile(NamedTuple):
    """The part of the result that a program computes."""

    rows: int
    """Rows of x."""
    columns: int
    """Columns of the result, which are rows of the weight."""
    warps: int


def tile_of(rows: int, form: WeightForm) -> Tile:
    """The tiles of a step with so many rows.

    Where groups have scales, a tile has two sums, and those of 128 rows would spill registers on GPUs that sum in them
    (compute capability 8 and 12). MXFP4 has one sum: its scales multiply the weights. FP8 would spill them, too: it is
    widened in another order than the instruction takes it, and goes through shared memory once more.
    """
    if rows <= TILE_ROWS[2]:
        return Tile(next(tile for tile in TILE_ROWS if rows <= tile), 64, 4)
    has_two_sums = form.group > 0 and not form.float4
    return Tile(TILE_ROWS[2 if has_two_sums or form.float8 else 3], 128, 8)


@dataclass(frozen=True, slots=True)
class SwappedConstants:
    """Compile-time constants of a launch."""

    d_in: int
    d_out: int
    block_t: int
    """Rows of x of a program."""
    block_n: int
    """Columns of the result of a program, which are rows of the weight."""
    block_k: int
    """Inputs that are multiplied at once."""
    blocks: int
    """Such blocks of inputs that have one scale, or of which there is room for several at once."""
    stages: int
    """Blocks of inputs in flight at once."""
    warps: int
    bias: bool
    bits: int
    group: int
    groups: int
    """Groups of a row."""
    zeros: bool
    float8: bool
    unit: int
    """See `WeightForm.unit`."""
    float4: bool = False
    splits: int = 1
    """Parts of the sum over the inputs: see `GemmConstants`."""


def swapped_constants(d_in: int, d_out: int, tile: Tile, form: WeightForm, *, bias: bool = False) -> SwappedConstants:
    """The blocks of inputs and their order depend only on the weight, so a row of x gets the same bits in any tile."""
    return SwappedConstants(
        d_in=d_in,
        d_out=d_out,
        block_t=tile.rows,
        block_n=tile.columns,
        block_k=BLOCK_K,
        blocks=blocks_of(form),
        stages=stages_of(tile),
        warps=tile.warps,
        bias=bias,
        bits=form.bits,
        group=form.group,
        groups=-(-d_in // form.group) if form.group else 1,
        zeros=form.zeros,
        float8=form.float8,
        unit=form.unit,
        float4=form.float4,
    )


def blocks_of(form: WeightForm) -> int:
    """Blocks of inputs that have one scale, or whose weights have theirs multiplied in."""
    return 1 if form.group % (_BLOCKS * BLOCK_K) and not form.float4 else _BLOCKS


def stages_of(tile: Tile) -> int:
    """Blocks of inputs in flight: shared memory of 99 KiB, as GPUs with the least have it, holds fewer of many rows or
    columns.
    """
    return 2 if tile.columns > 128 else {TILE_ROWS[2]: 3, TILE_ROWS[3]: 2}.get(tile.rows, 4)


def swapped_options(tile: Tile, form: WeightForm) -> dict[str, int | bool]:
    """Options of a launch."""
    options = {"num_warps": tile.warps, "num_stages": stages_of(tile), "enable_fp_fusion": False}
    # else the assembler spills some registers to fit one more program on a multiprocessor
    is_short = tile.warps == 4 and (form.float8 or tile.rows == TILE_ROWS[2])
    return options | ({"maxnreg": 200} if is_short else {})
