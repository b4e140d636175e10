"""Schedule of the sampling launches; it depends only on the size of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class SamplingConstants:
    """Compile-time constants of the launches."""

    vocab: int
    blocks: int
    padded: int
    """`blocks`, or the next power of two."""
    block_chunk: int
    """Candidates of a tile [blocks, candidates]."""
    block: int = BLOCK
    fields: int = FIELDS
    pivots: int = _PIVOTS
    chunk: int = _TILE // _PIVOTS
    """Candidates of a tile [pivots, candidates]."""


def sampling_constants(vocab: int) -> SamplingConstants:
    """See `SamplingConstants`."""
    padded = 1 << (blocks(vocab) - 1).bit_length()
    return SamplingConstants(vocab, blocks(vocab), padded, max(1, _TILE // padded))


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
