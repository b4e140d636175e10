"""Products of rows with narrow weights of the experts that they go to, on a GPU, as the first operand of the matrix
instruction: see `swapped_gemm_triton`.

Tables, results and activations are those of `expert_tiles_triton`, and so is the function on the host.

Import this module lazily: it needs triton. Tests: tests/ops/moe/test_swapped_tiles_interpreted.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

import triton
import triton.language as tl

from ..elementwise.gates_triton import gated
from ..gemm.swapped_gemm_triton import sum_products
from .expert_tiles_schedule import GATE_ROWS
from .find_tile_triton import find_tile

_GATE = tl.constexpr(GATE_ROWS)


@triton.jit
def multiply_swapped_tiles(y, x, weight, bias, pairs, expert_of, first_of, end_of, x_stride, C: tl.constexpr):
    """As `multiply_tiles`, with the same arguments and grid, but for C: `SwappedTileConstants`."""
    BLOCK_T: tl.constexpr = C.block_t
    BLOCK_N: tl.constexpr = C.block_n
    D_OUT: tl.constexpr = C.d_out
    GATED: tl.constexpr = C.gating is not None
    ROWS: tl.constexpr = 2 * D_OUT if GATED else D_OUT
    dtype = y.dtype.element_ty
    has_pairs, expert, pair, own = find_tile(pairs, expert_of, first_of, end_of, C)
    if has_pairs:
        within = tl.arange(0, BLOCK_N)
        column = tl.program_id(1) * BLOCK_N + within
        if GATED:  # rows of gate and of up alternate, so that one thread has both of a result
            half = within // _GATE % 2
            column = tl.program_id(1) * (BLOCK_N // 2) + within // (2 * _GATE) * _GATE + within % _GATE
            own_column = column < D_OUT
            column += half * D_OUT
        else:
            own_column = column < D_OUT
        row = (expert * ROWS + column)[:, None]
        of_row = x + (pair // C.per_row)[None, :] * x_stride
        total = sum_products(of_row, own[None, :], weight, row, own_column[:, None], dtype, C)
        if C.bias:
            total += tl.load(bias + expert * ROWS + column, mask=own_column, other=0.0).to(tl.float32)[:, None]
        value = total.to(dtype)
        if GATED:
            both = tl.reshape(value, (BLOCK_N // (2 * _GATE), 2, _GATE, BLOCK_T))
            gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
            value = gated(gate.to(tl.float32), up.to(tl.float32), dtype, C)
            value = tl.reshape(value, (BLOCK_N // 2, BLOCK_T))
            column = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            own_column = column < D_OUT
        out = y + pair[None, :] * D_OUT + column[:, None]
        tl.store(out, value, mask=own[None, :] & own_column[:, None])


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportIndexIssue=false
