"""Schedule of the sampling launches; it depends only on the size of the vocabulary."""

from __future__ import annotations

#: Logits per program of the first two launches: sums are split there, whatever else is in the step.
BLOCK = 4096

#: Float64 values of an entry, see `sampling_triton`.
FIELDS = 8

#: Number of pivot logits above which the mass is summed, so that few candidates remain for a limit.
_PIVOTS = 32

#: Elements of a tile [pivots or blocks, candidates], which is kept in registers: 16 float64 values per thread.
_TILE = 4096


def blocks(vocab: int) -> int:
    """Blocks of a row of logits."""
    return -(-vocab // BLOCK)


def _padded(vocab: int) -> int:
    return 1 << (blocks(vocab) - 1).bit_length()


def ban_constants(vocab: int) -> dict[str, int]:
    """Compile-time constants of the launch that bans tokens."""
    return {"VOCAB": vocab, "BLOCK": BLOCK}


def peak_constants(vocab: int) -> dict[str, int]:
    """Compile-time constants of the launch that finds the largest logits."""
    return {"VOCAB": vocab, "BLOCK": BLOCK, "BLOCKS": blocks(vocab), "FIELDS": FIELDS}


def weigh_constants(vocab: int) -> dict[str, int]:
    """Compile-time constants of the launch that sums up masses."""
    return peak_constants(vocab) | {"PADDED": _padded(vocab), "PIVOTS": _PIVOTS}


def pick_constants(vocab: int) -> dict[str, int]:
    """Compile-time constants of the launch that picks tokens."""
    padded = _padded(vocab)
    return weigh_constants(vocab) | {"CHUNK": _TILE // _PIVOTS, "BLOCK_CHUNK": max(1, _TILE // padded)}


def sum_shape(entries: int, vocab: int) -> tuple[int, int, int]:
    """Shape of the sums that the second launch writes for the third."""
    return entries, blocks(vocab), _PIVOTS


def ban_options() -> dict[str, int | bool]:
    return {"num_warps": 8}


def peak_options() -> dict[str, int | bool]:
    return {"num_warps": 8, "enable_fp_fusion": False}


def weigh_options() -> dict[str, int | bool]:
    return {"num_warps": 8, "enable_fp_fusion": False}


def pick_options() -> dict[str, int | bool]:
    return {"num_warps": 8, "enable_fp_fusion": False}
