"""Ops of relative attention by learned vectors: see `RelativeSpec`.

Tests: tests/core/layers/test_relative_attention.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.attention import AttentionSpec
from .ops import Op, Read


@dataclass(frozen=True, slots=True)
class TakeRelative(Op):
    """Relative states `[tokens, heads · dim]` of columns of x; they grow with their position as queries do."""

    READS = ("x",)
    WRITES = ("out",)

    x: Read
    out: str
    attention: AttentionSpec
