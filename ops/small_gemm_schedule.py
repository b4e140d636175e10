"""Schedule of a product of few rows with a weight: by the weight's shape alone, never by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

#: Most rows of a product: the rows of a matrix instruction's tile, which a launch computes in any case.
MAX_ROWS = 16

#: Outputs from which on programs of 32 columns are as many as a large GPU's multiprocessors (4096 / 32 = 128, and an
#: H100 has 132). Chosen from the shapes, not measured. Below, programs have 16: each reads all of x.
_WIDE = 4096


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """Sizes of a launch, all compile-time constants of the kernel.

    block_n: columns of weights that a program reads. block_k: inputs that a warp multiplies with at once. splits: parts
    of the sum over the inputs, one for each warp of a program. stages: blocks of inputs under way at once; with a norm
    one less, as its passes take shared memory, too.
    """

    block_n: int
    block_k: int = 64
    splits: int = 4
    stages: int = 4

    def blocks(self, d_out: int, *, silu: bool = False) -> int:
        """Programs of a launch with `d_out` columns in its result."""
        return -(-d_out // self.columns(silu))

    def columns(self, silu: bool) -> int:
        """Columns of the result that a program has; each is of two of the weight's with an activation."""
        return max(16, self.block_n // 2) if silu else self.block_n


def gemm_schedule(rows: int) -> GemmSchedule:
    """The schedule of a weight of `rows` rows, which are outputs.

    The sum is cut alike for every weight: part s has inputs 64·s to 64·s + 63 of every 256, in order.
    """
    return GemmSchedule(block_n=32 if rows >= _WIDE else 16)


def gemm_constants(
    schedule: GemmSchedule, d_in: int, d_out: int, *, bias: bool = False, silu: bool = False, norm: bool = False,
    add: bool = False, keep: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Compile-time constants of a launch; d_out: columns of its result, half the weight's rows with `silu`."""
    return {
        "D_IN": d_in, "D_OUT": d_out, "BLOCK_T": MAX_ROWS, "BLOCK_N": schedule.columns(silu),
        "BLOCK_K": schedule.block_k, "SPLITS": schedule.splits, "STAGES": schedule.stages - norm, "BIAS": int(bias),
        "SILU": int(silu), "NORM": int(norm), "ADD": int(add), "KEEP": int(keep), "PDL": 0,
    }  # fmt: skip


def gemm_options(schedule: GemmSchedule) -> dict[str, int | bool]:
    """Options of a launch; norms and activations round as in `elementwise_triton`, without fusion."""
    return {"num_warps": schedule.splits, "num_stages": schedule.stages, "enable_fp_fusion": False}
