"""Schedule of a product of few rows with a weight: by the weight's shape and the tile that holds the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sgmv_schedule import ExpandShape

#: Rows of a launch's tile, which it computes in any case: of one matrix instruction of a warp, and of a warp group's
#: (`wgmma`).
TILE_ROWS = 16, 64

#: Most rows of a product.
MAX_ROWS = TILE_ROWS[-1]

#: Most rows of a product behind which adapters are expanded. A program loads rank-rows for `GemmSchedule.tiles` rows
#: before the product, and for the others behind it, group after group, each of which waits for three loads: with 64
#: rows for longer than launches of their own take.
MAX_EXPANDED_ROWS = 32

#: Outputs from which on programs of 32 columns are as many as a large GPU's multiprocessors (4096 / 32 = 128, and an
#: H100 has 132). Chosen from the shapes, not measured. Below, programs have 16: each reads all of x.
_WIDE = 4096

#: The same of programs of 128 columns. A tile of 64 rows has twice as many columns at least, or programs would read x,
#: from the second-level cache, for longer than the weight.
_WIDEST = 16384

#: Bytes of weights that a program fetches before the launch before it has ended: 25 MB on an H100 that is full of
#: programs, half of its second-level cache.
_FETCHED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """Sizes of a launch, all compile-time constants of the kernel.

    block_t: rows of the tile. block_n: columns of weights that a program reads. splits: parts of the sum over the
    inputs, one for each warp of a program, or 1 for a sum by all warps together. block_k: inputs of a part that are
    multiplied at once. stages: blocks of inputs under way at once. max_registers: of a thread; 0 for what the assembler
    chooses, which may rather spill a few than have fewer programs on a multiprocessor.
    """

    block_t: int
    block_n: int
    splits: int
    warps: int
    stages: int
    block_k: int = 64
    max_registers: int = 0

    def blocks(self, widths: Sequence[int], *, silu: bool = False) -> int:
        """Programs of a launch over modules of so many columns in its result; each has columns of one module."""
        return sum(-(-width // self.columns(silu)) for width in widths)

    def columns(self, silu: bool) -> int:
        """Columns of the result that a program has; each is of two of the weight's with an activation."""
        return max(16, self.block_n // 2) if silu else self.block_n

    @property
    def tiles(self) -> int:
        """Rows with adapters that are expanded at once: half of what a tile may have. With all of 16 rows, a
        program takes up to 253 registers, and Triton 3.6 spills 288 to 1,888 bytes.
        """
        return 2 * self.warps

    @property
    def fetched(self) -> int:
        """Inputs of its columns, in 16 bits, that a program fetches early."""
        return min(1024, _FETCHED_BYTES // (2 * self.block_n))


#: Constants of a launch behind which no adapters are expanded, but for the width of its result.
_ALONE = dict.fromkeys(
    ("MODULES", "M0", "M1", "M2", "W1", "W2", "PAGE", "VEC", "BLOCKS", "PAGES", "PARTS", "PART_BLOCK"), 0
)


def tile_rows(rows: int) -> int:
    """Rows of the tile that holds up to MAX_ROWS rows."""
    return next(tile for tile in TILE_ROWS if rows <= tile)


def fewest_rows(rows: int) -> int:
    """Fewest rows that are held by the tile of `rows` rows; a row's bits are the same among these and more."""
    return 1 + max(tile for tile in (0, *TILE_ROWS) if tile < rows)


def gemm_schedule(outputs: int, rows: int, *, expanded: bool = False) -> GemmSchedule:
    """The schedule of a weight of `outputs` rows for up to `rows` rows of x. expanded: adapters are behind it, and
    their rank-rows leave a tile of 64 rows registers for 32 columns.

    The sum of a tile is cut alike for every weight: in one of 16 rows part s has inputs 64·s to 64·s + 63 of every 256,
    in order; in one of 64 it is one, in order.
    """
    if tile_rows(rows) == TILE_ROWS[0]:
        return GemmSchedule(block_t=16, block_n=32 if outputs >= _WIDE else 16, splits=4, warps=4, stages=4)
    block_n = 32 if expanded or outputs < _WIDE else 64 if outputs < _WIDEST else 128
    registers = 255 if expanded else 0
    return GemmSchedule(64, block_n, splits=1, warps=8, stages=3 if block_n > 64 else 4, max_registers=registers)


def gemm_constants(
    schedule: GemmSchedule,
    d_in: int,
    d_out: int,
    *,
    bias: bool = False,
    silu: bool = False,
    shape: ExpandShape | None = None,
) -> dict[str, int]:
    """Compile-time constants of a launch; d_out: columns of its result, half the weight's rows with `silu`."""
    return {
        "D_IN": d_in,
        "D_OUT": d_out,
        "BLOCK_T": schedule.block_t,
        "BLOCK_N": schedule.columns(silu),
        "BLOCK_K": schedule.block_k,
        "SPLITS": schedule.splits,
        "STAGES": schedule.stages,
        "FETCHED": schedule.fetched,
        "TILES": schedule.tiles,
        "BIAS": int(bias),
        "SILU": int(silu),
        "PDL": 0,
        **(_ALONE | {"W0": d_out} if shape is None else shape.constants()),
    }


def gemm_options(schedule: GemmSchedule) -> dict[str, int | bool]:
    """Options of a launch; activations round as in `elementwise_triton`, without fusion."""
    options = {"num_warps": schedule.warps, "num_stages": schedule.stages, "enable_fp_fusion": False}
    return options | ({"maxnreg": schedule.max_registers} if schedule.max_registers else {})
