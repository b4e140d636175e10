"""Schedule of a GEMM of a few rows, by the weight's shape and the tile that holds the rows.

Tests: tests/ops/gemm/test_small_gemm_triton.py, tests/core/executors/test_cuda_gemm_backends.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..lora.sgmv_schedule import ExpandShape, Modules, Records

#: Rows of a launch's tile, which are computed in any case: those of one matrix instruction of a warp, and of a warp
#: group (`wgmma`).
TILE_ROWS = 16, 64

#: The most rows of this GEMM.
MAX_ROWS = TILE_ROWS[-1]

#: The most rows for which a GEMM also expands adapters. A program loads rank-rows for `GemmSchedule.tiles` rows before
#: the GEMM and for the others after it, group after group, and each group waits for three loads. With 64 rows that
#: takes longer than separate launches.
MAX_EXPANDED_ROWS = 32

#: Outputs from which on programs of 64 rows of the weight are many for any GPU. Below, programs have fewer rows, so
#: that all of them run at once: on an H200 a product is fastest if its programs are one wave with much under way
#: (`perf/notebook/gpu.md`).
_WIDE = 16384

#: Inputs of a part of the sum that are multiplied at once.
_BLOCK_K = 128

#: Programs of two for each multiprocessor of an H100 or H200. As many of 96 KiB of shared memory run at once, of 64 KiB
#: half as many more.
_TWICE = 264

#: Bytes of weights that a program fetches before the previous launch has ended: 25 MB on an H100 that is full of
#: programs, half of its L2 cache.
_FETCHED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """Sizes of a launch; all are compile-time constants of the kernel."""

    block_t: int
    """Rows of the tile."""
    block_n: int
    """Columns of weights that a program reads."""
    splits: int
    """Parts of the sum over the inputs, one for each warp of a program, or 1 for a sum by all warps together."""
    warps: int
    stages: int
    """Blocks of inputs in flight at once."""
    block_k: int = _BLOCK_K
    """Inputs of a part that are multiplied at once."""
    max_registers: int = 0
    """Registers per thread; 0: the assembler chooses, and may spill a few to fit more programs on a multiprocessor."""
    tiles: int = 8
    """Rows with adapters that are expanded at once: at most half of a tile. With all of 16 rows, a program takes up to
    253 registers, and Triton 3.6 spills 288 to 1,888 bytes. Narrow weights that are widened leave room for a quarter.
    """

    def blocks(self, widths: Sequence[int], *, silu: bool = False) -> int:
        """Programs of a launch over modules with these columns in the result; each has columns of one module."""
        return sum(-(-width // self.columns(silu)) for width in widths)

    def columns(self, silu: bool) -> int:
        """Columns of the result per program; with an activation, each needs two of the weight's columns."""
        return max(16, self.block_n // 2) if silu else self.block_n

    @property
    def fetched(self) -> int:
        """Inputs of its columns, in 16 bits, that a program fetches early."""
        return min(1024, _FETCHED_BYTES // (2 * self.block_n))


class WeightForm(NamedTuple):
    """How a weight lies in memory."""

    bits: int = 16
    """Bits of a weight; 16: it has the dtype of the product, whatever that is, and nothing else counts."""
    group: int = 0
    """Inputs that share a scale; 0: all of a row."""
    zeros: bool = False
    """It has zero points."""
    float8: bool = False
    float4: bool = False
    """See `NarrowWeight.float4`. This GEMM takes no such weight, those with swapped operands and of experts do."""

    @property
    def unit(self) -> int:
        """Bits that are loaded as one number: a weight, or a word of several."""
        return self.bits if self.bits == 16 or (self.bits == 8 and not self.float8) else 32


FULL = WeightForm()


@dataclass(frozen=True, slots=True)
class GemmConstants:
    """Compile-time constants of a launch."""

    d_in: int
    d_out: int
    """Columns of the result; with `silu`, half the weight's rows."""
    block_t: int
    block_n: int
    """Columns of the result of a program."""
    block_k: int
    splits: int
    stages: int
    fetched: int
    tiles: int
    bias: bool
    silu: bool
    modules: Modules
    """The projections whose adapters it expands, if there are any, else one module as wide as the result."""
    records: Records = field(default_factory=Records)
    parts: int = 0
    """Number of shrink's partial sums; 0: it expands no adapters."""
    part_block: int = 0
    """`parts`, or the next power of two."""
    pdl: bool = False
    """The previous launch may still be running when this one begins."""
    bits: int = 16
    group: int = 0
    groups: int = 1
    """Groups of a row."""
    zeros: bool = False
    float8: bool = False
    unit: int = 16
    """See `WeightForm.unit`."""


def tile_rows(rows: int) -> int:
    """Rows of the tile that holds up to MAX_ROWS rows."""
    return next(tile for tile in TILE_ROWS if rows <= tile)


def fewest_rows(rows: int) -> int:
    """The fewest rows that use the same tile as `rows` rows; within this range a row has the same bits."""
    return 1 + max(tile for tile in (0, *TILE_ROWS) if tile < rows)


def gemm_schedule(outputs: int, rows: int, form: WeightForm = FULL, *, expanded: bool = False) -> GemmSchedule:
    """The schedule of a weight of `outputs` rows for up to `rows` rows of x.

    expanded: it also expands adapters, whose rank-rows leave a tile of 64 rows registers for 32 columns. The sum of a
    tile is split alike for every weight of a form. In a tile of 16 rows, part s has inputs 128·s to 128·s + 127 of
    every 512, in order; if the group size is not a multiple of 128, inputs 64·s to 64·s + 63 of every 256. In a tile of
    64 rows there is one part, in order.
    """
    if form.group % _BLOCK_K:  # a block of inputs has one scale
        return replace(gemm_schedule(outputs, rows, form._replace(group=0), expanded=expanded), block_k=_BLOCK_K // 2)
    if tile_rows(rows) == TILE_ROWS[0]:
        few = GemmSchedule(16, 16, splits=4, warps=4, stages=4, max_registers=255 if expanded else 0)
        few = replace(few, tiles=4) if form.bits < 16 else few
        if outputs >= _WIDE:
            if form.bits < 16 and not expanded:
                # widened weights take registers and shared memory: of 64 columns, one or two programs would fit on a
                # multiprocessor. The compiler's own choice of registers spills some.
                return replace(few, block_n=32, stages=2, max_registers=168)
            wide = GemmSchedule(16, 64, splits=4, warps=4, stages=2, max_registers=255)
            return replace(few, block_n=32, stages=3) if expanded else wide
        return few if few.blocks((outputs,)) <= _TWICE else replace(few, stages=3)
    if expanded:
        tiles = 16 if form.bits == 16 else 8
        return GemmSchedule(64, 32, splits=1, warps=8, stages=4, max_registers=255, tiles=tiles)
    if outputs >= _WIDE:
        return GemmSchedule(64, 64, splits=1, warps=4, stages=3)
    return GemmSchedule(64, 32, splits=1, warps=4, stages=4)


def gemm_constants(
    schedule: GemmSchedule,
    d_in: int,
    d_out: int,
    form: WeightForm = FULL,
    *,
    bias: bool = False,
    silu: bool = False,
    shape: ExpandShape | None = None,
) -> GemmConstants:
    """d_out: columns of the result; with `silu`, half the weight's rows."""
    ids, widths = ((0,), (d_out,)) if shape is None else (shape.modules, shape.widths)
    constants = GemmConstants(
        d_in=d_in,
        d_out=d_out,
        block_t=schedule.block_t,
        block_n=schedule.columns(silu),
        block_k=schedule.block_k,
        splits=schedule.splits,
        stages=schedule.stages,
        fetched=schedule.fetched,
        tiles=schedule.tiles,
        bias=bias,
        silu=silu,
        modules=Modules.build(ids, widths, schedule.columns(silu)),
        bits=form.bits,
        group=form.group,
        groups=-(-d_in // form.group) if form.group else 1,
        zeros=form.zeros,
        float8=form.float8,
        unit=form.unit,
    )
    if shape is None:
        return constants
    return replace(
        constants, records=shape.records, parts=shape.splits, part_block=1 << (shape.splits - 1).bit_length()
    )


def gemm_options(schedule: GemmSchedule) -> dict[str, int | bool]:
    """Options of a launch; activations round as in `elementwise_triton`, without fusion."""
    options = {"num_warps": schedule.warps, "num_stages": schedule.stages, "enable_fp_fusion": False}
    return options | ({"maxnreg": schedule.max_registers} if schedule.max_registers else {})
