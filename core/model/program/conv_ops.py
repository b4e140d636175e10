"""Ops of short convolutions of streams: see `StreamConvSpec`.

Tests: tests/core/layers/test_stream_convs.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ....ops.mixers.stream_convs import ConvPlace
from ..specs.stream_convs import StreamConvSpec
from .ops import Op, Read


@dataclass(frozen=True, slots=True)
class ConvolveStream(Op):
    """`out = x + conv(x)`; the sequences' states go on."""

    READS = ("x",)
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("weights",)

    x: Read
    out: str
    width: int
    place: ConvPlace
    convs: StreamConvSpec
    weights: str = "recurrent"
