"""Blocks of a prompt: positions that see each other, also those behind them, so that one step computes them all.

A chunk of a prompt ends before a block or behind it. Keys and values of a block's positions depend on all of it, so
cached ones are used up to a block, or beyond it.

Tests: tests/core/requests/test_blocks.py
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING

from ...ops.attention.blocks import BlockSpans
from .media import MediaItem

if TYPE_CHECKING:
    import numpy as np

_FIRST = itemgetter(0)


class CutBlock(RuntimeError):
    """A step has only a part of a block."""


class Blocks(StrEnum):
    """Positions of a prompt that see each other, also those behind them."""

    IMAGES = "images"
    """Those of an image that have no other token between them."""

    PROMPT = "prompt"
    """All of a prompt, also of one without images."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The blocks of a prompt."""

    spans: tuple[tuple[int, int], ...] = ()
    """First position, and the one behind the last, of each; in order, none next to another."""

    prompt: str = ""
    """Where the whole prompt is a block, a digest of it, by which the prefix cache tells its tokens apart."""

    @property
    def longest(self) -> int:
        """Positions of the longest one."""
        return max((end - first for first, end in self.spans), default=0)

    def around(self, place: int) -> tuple[int, int] | None:
        """The block that a border before position `place` would cut; None if there is none."""
        at = bisect_right(self.spans, place, key=_FIRST) - 1
        if at < 0:
            return None
        first, end = self.spans[at]
        return (first, end) if first < place < end else None

    def chunk(self, start: int, count: int) -> int:
        """How many positions from `start` on a step may compute, at most `count`; more only to have all of a block."""
        cut = self.around(start + count)
        if cut is None:
            return count
        first, end = cut
        return (first if first > start else end) - start

    def cached(self, blocks: int, size: int) -> int:
        """How many pages of cached positions, at most `blocks`, end in no block. size: positions of a page."""
        while cut := self.around(blocks * size):
            blocks = cut[0] // size
        return blocks

    def of(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """See `BlockSpans`, of positions `start … end`. Raises CutBlock if a block is not wholly within them."""
        import numpy as np  # not needed to schedule

        before, behind = (np.zeros(end - start, dtype=np.int32) for _ in range(2))
        for first, last in self.spans:
            if last <= start or first >= end:
                continue
            if first < start or last > end:
                raise CutBlock(f"a step has positions {start} to {end - 1}, and {first} to {last - 1} see each other")
            places, count = slice(first - start, last - start), np.arange(last - first, dtype=np.int32)
            before[places], behind[places] = count, count[::-1]
        return before, behind


NO_BLOCKS = PromptBlocks()


def blocks_of(kind: Blocks | None, tokens: Sequence[int], media: Sequence[MediaItem], scope: str = "") -> PromptBlocks:
    """The blocks of a prompt. scope: see `keys_of`."""
    if kind is Blocks.PROMPT:
        digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16)
        for item in media:
            digest.update(f"\n{item.digest}{scope} {item.runs}".encode())
        return PromptBlocks(((0, len(tokens)),), digest.hexdigest())
    if kind is None or not media:
        return NO_BLOCKS
    spans: list[tuple[int, int]] = []
    for first, count in sorted(run for item in media for run in item.runs):
        if spans and spans[-1][1] == first:
            spans[-1] = spans[-1][0], first + count
        else:
            spans.append((first, first + count))
    return PromptBlocks(tuple(spans))


def spans_of(parts: Sequence[tuple[PromptBlocks, int, int]]) -> BlockSpans | None:
    """The blocks of a step's tokens; None if it has none. parts: of each sequence, its blocks and the positions that
    the step computes.
    """
    if not any(blocks.spans and start < blocks.spans[-1][1] for blocks, start, _ in parts):
        return None
    import numpy as np

    found = [blocks.of(start, end) for blocks, start, end in parts]
    before, behind = (np.concatenate(each) for each in zip(*found, strict=True))
    return BlockSpans(before, behind) if before.any() or behind.any() else None
