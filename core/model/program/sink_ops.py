"""The op of a mixture with experts that every token goes to, whose weights its router makes.

Tests: tests/core/layers/test_sink_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.feed_forward import Experts
from .ops import Op, Read


@dataclass(frozen=True, slots=True)
class MoeWithSinks(Op):
    """A mixture of experts, and of sinks: see `Experts.sinks`."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("experts", "sinks")

    x: Read
    out: str
    spec: Experts
    experts: str = "experts"
    sinks: str = "sink_experts"
