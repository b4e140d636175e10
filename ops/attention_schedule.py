"""Schedule of decode attention: a row's KV is cut by its length alone, its programs are counted by the bucket.

A row's KV is cut into tiles of `tile_tokens`, and these into at most `PARTS` parts of as many tiles each. A part's
softmax is summed tile by tile, and parts are added up in order, whichever program has summed them. So the bits of a
row's result depend on its own length, and neither on the bucket nor on its company.
"""

from __future__ import annotations

#: Most parts of a row. Each takes one output and two sums per query head in float32 while a row is shared.
PARTS = 32

#: Query heads that a program multiplies with: rows of the matrix instruction's tile. Heads that are not there are zero.
BLOCK_H = 16

#: Bytes of a tile's keys, and as many of its values.
_TILE_BYTES = 16 << 10

#: Programs that a launch should have for each multiprocessor, where rows and KV heads alone give less than one.
_PROGRAMS_PER_SM = 2

#: Least tiles that a program of a shared row has: below, adding up takes longer than reading.
_LEAST_TILES = 2

#: With rows enough for all multiprocessors, rows of more tiles than so many alone are shared, by so many programs at
#: most.
_LONG_TILES, _LONG_SPLITS = 64, 8


def largest_head(itemsize: int) -> int:
    """Most elements of a head: in float32, without matrix instructions, wider ones spill registers."""
    return 128 if itemsize == 4 else 256


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def tile_tokens(head_dim: int, itemsize: int) -> int:
    """Tokens of a tile: at least 16, which a matrix instruction multiplies with."""
    return min(128, max(16, _TILE_BYTES // (_power_of_two(head_dim) * itemsize)))


def attention_splits(rows: int, kv_heads: int, max_tokens: int, tile: int, num_sms: int) -> tuple[int, int]:
    """Programs per row and KV head of a launch, most of which have nothing to do where rows are short, and the least
    tiles that each has.

    rows: of the launch. max_tokens: most of a row.
    """
    programs, parts = rows * kv_heads, min(PARTS, -(-max_tokens // tile))
    if programs < num_sms:
        return min(parts, -(-_PROGRAMS_PER_SM * num_sms // programs)), _LEAST_TILES
    return min(parts, _LONG_SPLITS, -(-max_tokens // (tile * _LONG_TILES))), _LONG_TILES


def attention_constants(
    num_heads: int, kv_heads: int, head_dim: int, block_tokens: int, itemsize: int
) -> dict[str, int]:
    """Compile-time constants of a launch; the same for every bucket."""
    return {
        "HEADS": num_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_H": BLOCK_H,
        "BLOCK_D": _power_of_two(head_dim),
        "TILE": tile_tokens(head_dim, itemsize),
        "PARTS": PARTS,
        "PDL": 0,
    }


def attention_options() -> dict[str, int | bool]:
    """Options of a launch. Without fusion, so that a part is added with the same bits in every loop.

    With three stages the next tile is loaded while the present one is multiplied. Five, for heads of up to 128 elements
    in 16 bits, would have two loads under way and fit every GPU's shared memory; five were not measured.
    """
    return {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
