"""A program's tile of experts' products, in kernels. Import this module lazily: it needs triton.

Tests: tests/ops/moe/test_expert_tiles_interpreted.py, tests/ops/moe/test_swapped_tiles_interpreted.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.cuda as cuda


@triton.jit
def find_tile(pairs, expert_of, first_of, end_of, C: tl.constexpr):
    """Return whether a program's tile has pairs, its expert, its pairs `[block_t]`, and which of these there are.

    The arguments are those of `multiply_tiles`. It waits for the previous launch, if that may still be running. Expert
    and pairs are int64; pairs that there are not are 0.
    """
    BLOCK_T: tl.constexpr = C.block_t
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    tile = tl.program_id(0)
    first, end = tile, tile + 1
    if not C.of_pairs:
        first = tl.load(first_of + tile)
        end = tl.load(end_of + tile)
    expert = tl.load(expert_of + tile).to(tl.int64)
    place = first + tl.arange(0, BLOCK_T)
    own = place < end
    pair = tl.where(own, place, 0).to(tl.int64)
    if not C.of_pairs:
        pair = tl.load(pairs + place, mask=own, other=0).to(tl.int64)
    return first < end, expert, pair, own


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportAttributeAccessIssue=false
