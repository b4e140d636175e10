"""Integers of a few bits that are packed into words of 32 bits, low bits first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WORD_BITS = 32


def unpack(words: torch.Tensor, bits: int, dim: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Return unsigned integers (uint8) of a matrix whose dimension `dim` is packed.

    order: where in its word's run the integer at bit `i · bits` belongs. Default: at `i`.
    """
    import torch

    each = WORD_BITS // bits
    shape = (*words.shape[: dim + 1], each, *words.shape[dim + 1 :])
    unpacked = torch.empty(shape, dtype=torch.uint8)
    for index, place in enumerate(order or range(each)):
        unpacked.select(dim + 1, place).copy_((words >> (index * bits)) & ((1 << bits) - 1))
    return unpacked.flatten(dim, dim + 1)


def words_of(part: slice, each: int) -> tuple[slice, slice]:
    """The words that hold `part` of a packed dimension, and where `part` is in them. each: integers per word."""
    first = part.start // each
    return slice(first, -(-part.stop // each)), slice(part.start - first * each, part.stop - first * each)


def num_words(length: int, bits: int) -> int:
    """Words that `length` integers take."""
    return -(-length * bits // WORD_BITS)
