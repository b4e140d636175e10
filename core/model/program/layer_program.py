"""A layer's ops in order, cut where steps with prompts are captured in pieces.

Tests: tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .op import Op


class Kept(NamedTuple):
    """A buffer that ops of one captured piece leave to another: it needs memory that does not move."""

    name: str
    shape: tuple[int, ...]
    """The shape of one token's share."""

    is_index: bool = False
    """It holds whole numbers (int32)."""

    is_wide: bool = False
    """It holds float32 whatever the model's dtype."""


@dataclass(frozen=True, slots=True)
class LayerProgram:
    """A layer's ops, in three parts: steps with prompts are captured in pieces between the mixers."""

    before: tuple[Op, ...]
    mixers: tuple[Op, ...]
    """Those with `Op.IS_CUT`."""

    after: tuple[Op, ...]
    reads: tuple[Kept, ...] = ()
    """Buffers of `before` that later ops read, besides the residual stream and per-layer embeddings."""

    mixed: tuple[Kept, ...] = ()
    """Buffers that the mixers write and later ops read, likewise."""

    lasting: tuple[Kept, ...] = ()
    """Buffers that the layer leaves to later ones."""

    earlier: LayerProgram | None = None
    """What comes before it, where a layer has several mixers, or one of several parts: up to the last but one."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of them in order."""
        return tuple(op for each in self.segments for op in each.before + each.mixers + each.after)

    @property
    def segments(self) -> tuple[LayerProgram, ...]:
        """Programs of one mixer, or of one part of a mixer, each."""
        return (self,) if self.earlier is None else (*self.earlier.segments, self)
