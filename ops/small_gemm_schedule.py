"""Schedule of a product of few rows with a weight: by the weight's shape alone, never by the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sgmv_schedule import ExpandShape

#: Most rows of a product: the rows of a matrix instruction's tile, which a launch computes in any case.
MAX_ROWS = 16

#: Outputs from which on programs of 32 columns are as many as a large GPU's multiprocessors (4096 / 32 = 128, and an
#: H100 has 132). Chosen from the shapes, not measured. Below, programs have 16: each reads all of x.
_WIDE = 4096


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """Sizes of a launch, all compile-time constants of the kernel.

    block_n: columns of weights that a program reads. block_k: inputs that a warp multiplies with at once. splits: parts
    of the sum over the inputs, one for each warp of a program. stages: blocks of inputs under way at once.
    """

    block_n: int
    block_k: int = 64
    splits: int = 4
    stages: int = 4

    def blocks(self, widths: Sequence[int], *, silu: bool = False) -> int:
        """Programs of a launch over modules of so many columns in its result; each has columns of one module."""
        return sum(-(-width // self.columns(silu)) for width in widths)

    def columns(self, silu: bool) -> int:
        """Columns of the result that a program has; each is of two of the weight's with an activation."""
        return max(16, self.block_n // 2) if silu else self.block_n


#: Constants of a launch behind which no adapters are expanded, but for the width of its result.
_ALONE = dict.fromkeys(
    ("MODULES", "M0", "M1", "M2", "W1", "W2", "PAGE", "VEC", "BLOCKS", "PAGES", "PARTS", "PART_BLOCK"), 0
)


def gemm_schedule(rows: int) -> GemmSchedule:
    """The schedule of a weight of `rows` rows, which are outputs.

    The sum is cut alike for every weight: part s has inputs 64·s to 64·s + 63 of every 256, in order.
    """
    return GemmSchedule(block_n=32 if rows >= _WIDE else 16)


def gemm_constants(
    schedule: GemmSchedule, d_in: int, d_out: int, *, bias: bool = False, silu: bool = False,
    shape: ExpandShape | None = None,
) -> dict[str, int]:  # fmt: skip
    """Compile-time constants of a launch; d_out: columns of its result, half the weight's rows with `silu`."""
    return {
        "D_IN": d_in, "D_OUT": d_out, "BLOCK_T": MAX_ROWS, "BLOCK_N": schedule.columns(silu),
        "BLOCK_K": schedule.block_k, "SPLITS": schedule.splits, "STAGES": schedule.stages, "BIAS": int(bias),
        "SILU": int(silu), "PDL": 0, **(_ALONE | {"W0": d_out} if shape is None else shape.constants()),
    }  # fmt: skip


def gemm_options(schedule: GemmSchedule) -> dict[str, int | bool]:
    """Options of a launch; activations round as in `elementwise_triton`, without fusion."""
    return {"num_warps": schedule.splits, "num_stages": schedule.stages, "enable_fp_fusion": False}
