"""Schedule of a GEMM of a few rows, by the weight's shape and the tile that holds the rows.

Tests: tests/ops/test_small_gemm_triton.py, tests/core/executors/test_cuda_gemm_backends.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sgmv_schedule import ExpandShape

#: Rows of a launch's tile, which are computed in any case: those of one matrix instruction of a warp, and of a warp
#: group (`wgmma`).
TILE_ROWS = 16, 64

#: The most rows of this GEMM.
MAX_ROWS = TILE_ROWS[-1]

#: The most rows for which a GEMM also expands adapters. A program loads rank-rows for `GemmSchedule.tiles` rows before
#: the GEMM and for the others after it, group after group, and each group waits for three loads. With 64 rows that
#: takes longer than separate launches.
MAX_EXPANDED_ROWS = 32

#: Outputs from which on programs of 32 columns are as many as a large GPU's multiprocessors (4096 / 32 = 128, and an
#: H100 has 132). Chosen from the shapes, not measured. Below, programs have 16 columns: each reads all of x.
_WIDE = 4096

#: The same for programs of 128 columns. A tile of 64 rows has at least twice as many columns, because otherwise
#: programs would take longer to read x from the L2 cache than to read the weight.
_WIDEST = 16384

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
    block_k: int = 64
    """Inputs of a part that are multiplied at once."""
    max_registers: int = 0
    """Registers per thread; 0: the assembler chooses, and may spill a few to fit more programs on a multiprocessor."""

    def blocks(self, widths: Sequence[int], *, silu: bool = False) -> int:
        """Programs of a launch over modules with these columns in the result; each has columns of one module."""
        return sum(-(-width // self.columns(silu)) for width in widths)

    def columns(self, silu: bool) -> int:
        """Columns of the result per program; with an activation, each needs two of the weight's columns."""
        return max(16, self.block_n // 2) if silu else self.block_n

    @property
    def tiles(self) -> int:
        """Rows with adapters that are expanded at once: half of a tile.

        With all of 16 rows, a program takes up to 253 registers, and Triton 3.6 spills 288 to 1,888 bytes.
        """
        return 2 * self.warps

    @property
    def fetched(self) -> int:
        """Inputs of its columns, in 16 bits, that a program fetches early."""
        return min(1024, _FETCHED_BYTES // (2 * self.block_n))


#: Constants of a launch that expands no adapters, except the width of its result.
_ALONE = dict.fromkeys(
    ("MODULES", "M0", "M1", "M2", "M3", "W1", "W2", "W3", "PAGE", "VEC", "BLOCKS", "PAGES", "PARTS", "PART_BLOCK"), 0
)


def tile_rows(rows: int) -> int:
    """Rows of the tile that holds up to MAX_ROWS rows."""
    return next(tile for tile in TILE_ROWS if rows <= tile)


def fewest_rows(rows: int) -> int:
    """The fewest rows that use the same tile as `rows` rows; within this range a row has the same bits."""
    return 1 + max(tile for tile in (0, *TILE_ROWS) if tile < rows)


def gemm_schedule(outputs: int, rows: int, *, expanded: bool = False) -> GemmSchedule:
    """The schedule of a weight of `outputs` rows for up to `rows` rows of x.

    expanded: it also expands adapters, whose rank-rows leave a tile of 64 rows registers for 32 columns. The sum of a
    tile is split alike for every weight. In a tile of 16 rows, part s has inputs 64·s to 64·s + 63 of every 256, in
    order; in a tile of 64 rows there is one part, in order.
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
    """Compile-time constants of a launch. d_out: columns of its result; with `silu`, half the weight's rows."""
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
