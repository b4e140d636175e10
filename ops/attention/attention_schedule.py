"""Schedule of decode attention: a sequence's KV is split by its length alone; the bucket sets the number of programs.

A sequence's KV is split into tiles of `tile_tokens`, and these into at most `PARTS` parts with the same number of
tiles. The softmax of a part is summed tile by tile, and parts are added in order, whichever program computed them. So
the bits of the result depend only on the sequence's length, not on the bucket or other sequences (batch-invariant).

Tests: tests/ops/attention/test_attention_triton.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..elementwise.elementwise_schedule import power_of_two

#: The most parts of a sequence. Each takes one output and two sums per query head in float32 while programs share it.
PARTS = 32

#: Query heads of a program: rows of the matrix instruction's tile. Missing heads are zero.
BLOCK_H = 16

#: The most elements of a head for which four warps have the registers.
_WIDE_HEAD = 256

#: Compute capability, times ten, from which Triton reads E4M3.
LEAST_FLOAT8 = 89

#: Bytes of a tile's keys, of those in FP8 once they are widened; its values take as many.
_TILE_BYTES = 16 << 10

#: Programs per multiprocessor that a launch should have if sequences and KV heads alone give less than one.
_PROGRAMS_PER_SM = 2

#: The least tiles of a program that shares a sequence; with fewer, adding up takes longer than reading.
_LEAST_TILES = 2

#: With enough sequences for all multiprocessors, only sequences of more tiles than this are shared, by at most this
#: many programs.
_LONG_TILES, _LONG_SPLITS = 64, 8


def largest_head(itemsize: int) -> int:
    """The most elements of a head: in float32, without matrix instructions, wider heads spill registers."""
    return 128 if itemsize == 4 else 512


def tile_tokens(head_dim: int, itemsize: int, *, values: bool = True) -> int:
    """Tokens of a tile: at least 16, as a matrix instruction needs. values: False: they are part of the keys."""
    num_bytes = _TILE_BYTES if values else 2 * _TILE_BYTES
    return min(128, max(16, num_bytes // (power_of_two(head_dim) * itemsize)))


def attention_splits(rows: int, kv_heads: int, max_tokens: int, tile: int, num_sms: int) -> tuple[int, int]:
    """Return the programs per sequence and KV head, and the least tiles of each.

    Most of these programs have nothing to do if sequences are short. rows: sequences of the launch. max_tokens: the
    most tokens of a sequence.
    """
    programs, parts = rows * kv_heads, min(PARTS, -(-max_tokens // tile))
    if programs < num_sms:
        return min(parts, -(-_PROGRAMS_PER_SM * num_sms // programs)), _LEAST_TILES
    return min(parts, _LONG_SPLITS, -(-max_tokens // (tile * _LONG_TILES))), _LONG_TILES


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """Compile-time constants of a launch; the same for every bucket."""

    heads: int
    kv_heads: int
    """Of latents, which are one KV head: the groups of query heads, each of a program."""
    head_dim: int
    """Of values, and of keys without their tail."""
    block_tokens: int
    """Tokens of a page."""
    block_d: int
    """`head_dim`, or the next power of two."""
    tile: int
    """See `tile_tokens`."""
    window: int = 0
    """Tokens that a query sees, its own included; 0: all."""
    caps: bool = False
    """Scores have a soft cap."""
    pdl: bool = False
    """The previous launch may still be running when this one begins."""
    float8: bool = False
    """Keys and values are in FP8."""
    sinks: bool = False
    """Each head has a score more, see `attention.Scores`."""
    tail: int = 0
    """Elements of a key behind those that are its value, of latents; 0: values are kept by themselves."""
    block_tail: int = 0
    """`tail`, or the next power of two."""


def attention_constants(
    num_heads: int, kv_heads: int, head_dim: int, block_tokens: int, itemsize: int, value_dim: int | None = None
) -> AttentionConstants:
    """Constants of layers without a window and a soft cap. value_dim: of latents, whose values are the first elements
    of keys.
    """
    if value_dim is None:
        return AttentionConstants(
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_tokens=block_tokens,
            block_d=power_of_two(head_dim),
            tile=tile_tokens(head_dim, itemsize),
        )
    groups = (count for count in range(1, num_heads + 1) if num_heads % count == 0)
    kv_heads = next(count for count in groups if num_heads // count <= BLOCK_H)
    return AttentionConstants(
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=value_dim,
        block_tokens=block_tokens,
        block_d=power_of_two(value_dim),
        tile=tile_tokens(value_dim, itemsize, values=False),
        tail=head_dim - value_dim,
        block_tail=max(16, power_of_two(head_dim - value_dim)),
    )


def attention_options(head_dim: int) -> dict[str, int | bool]:
    """Options of a launch. Fusion is off, so that a part is added with the same bits in every loop.

    With three stages the next tile is loaded while the present one is multiplied. Five stages, for heads of up to 128
    elements in 16 bits, would have two loads in flight and fit every GPU's shared memory, but were not measured. Four
    warps would spill registers with the widest heads.
    """
    return {"num_warps": 8 if head_dim > _WIDE_HEAD else 4, "num_stages": 3, "enable_fp_fusion": False}
