"""Schedule of a GEMM of 17 to 64 rows whose inputs several programs share; it depends only on the weight's shape.

Tests: tests/ops/gemm/test_split_gemm_triton.py
"""

from __future__ import annotations

from dataclasses import dataclass

from .small_gemm_schedule import TILE_ROWS, tile_rows

#: Columns of a program, and inputs that it multiplies at once. A program reads all rows of x for its inputs, so with
#: four times the columns of `gemm_schedule` and a fourth of the inputs, x is read a fourth as often.
_BLOCK_N, _BLOCK_K = 128, 64

#: Programs that share the inputs of the same columns.
_PARTS = 4

#: Weights with more columns, or fewer inputs, have as many programs without sharing, or too short a sum.
_MOST_OUTPUTS, _LEAST_INPUTS = 8192, 2048


@dataclass(frozen=True, slots=True)
class SplitConstants:
    """Compile-time constants of a launch."""

    d_in: int
    d_out: int
    bias: bool
    pdl: bool = False
    """The previous launch may still be running when this one begins."""
    block_t: int = TILE_ROWS[-1]
    """Rows of the tile."""
    block_n: int = _BLOCK_N
    block_k: int = _BLOCK_K
    parts: int = _PARTS
    stages: int = 4
    """Blocks of inputs in flight at once."""
    fetched: int = 256
    """Inputs of its columns that a program fetches before the previous launch has ended."""

    @property
    def share(self) -> int:
        """Inputs of a part: whole blocks; the last part may have fewer."""
        blocks = -(-self.d_in // self.block_k)
        return -(-blocks // self.parts) * self.block_k

    @property
    def blocks(self) -> int:
        """Blocks of columns."""
        return -(-self.d_out // self.block_n)


def is_split(outputs: int, inputs: int, rows: int) -> bool:
    """Whether programs may share the inputs of a weight `[outputs, inputs]` for so many rows."""
    return tile_rows(rows) == TILE_ROWS[-1] and outputs <= _MOST_OUTPUTS and inputs >= _LEAST_INPUTS


def split_options(constants: SplitConstants) -> dict[str, int | bool]:
    """Options of a launch."""
    return {"num_warps": 4, "num_stages": constants.stages, "enable_fp_fusion": False}
