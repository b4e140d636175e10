"""Ops of a model's ends: what stands before all of its layers, and behind them.

Tests: tests/core/model/program/test_ends.py
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from .ops import EMBEDDED, STREAM, STREAMS, Op


class Rows(Enum):
    """Which of a step's tokens."""

    LOGITS = auto()
    """Those that have logits."""

    KEPT = auto()
    """Those whose final states are kept: for logits of prompts, and for pooling."""


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """`out = table[token] · factor`, the factor as the table's dtype has it."""

    WRITES = ("out",)
    SLOTS = ("table",)

    out: str
    table: str
    factor: float = 1.0

    adapted: bool = False
    """Adapters add to the rows, and have rows of their own."""

    first_from: int | None = None
    """Tokens from this one on have the first row."""


@dataclass(frozen=True, slots=True)
class AddPositions(Op):
    """`x += table[position]`."""

    READS = ("x",)
    WRITES = ("x",)
    SLOTS = ("table",)

    x: str
    table: str = "positions"


@dataclass(frozen=True, slots=True)
class EmbedMedia(Op):
    """Rows of tokens of images and of sound, from `first` on: of a table of their own, in place of x's."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("table",)

    x: str
    out: str
    first: int
    table: str = "media"


@dataclass(frozen=True, slots=True)
class PlaceImages(Op):
    """Rows that an encoder made of images, written to x in their tokens' places; rounded as the table's are."""

    READS = ("x",)
    WRITES = ("x",)
    SLOTS = ("table",)

    x: str
    table: str


@dataclass(frozen=True, slots=True)
class NormParts(Op):
    """The RMS norm of each part of x that is as wide as the weight."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: str
    out: str
    weight: str
    eps: float


@dataclass(frozen=True, slots=True)
class KeepEmbeddings(Op):
    """A copy of x, which all layers may read."""

    READS = ("x",)
    WRITES = ("out",)

    x: str = STREAM
    out: str = EMBEDDED


@dataclass(frozen=True, slots=True)
class SplitStreams(Op):
    """Several streams of x: the first is x, each other one a product of it, of the same magnitude."""

    READS = ("x",)
    WRITES = ("streams",)
    SLOTS = ("weights",)

    weights: tuple[str, ...]
    x: str = STREAM
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class JoinStreams(Op):
    """x is the mean of the first stream and of a product of each other one, of the same magnitude."""

    READS = ("streams",)
    WRITES = ("x",)
    SLOTS = ("weights",)

    weights: tuple[str, ...]
    x: str = STREAM
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class Select(Op):
    """Of each buffer, the rows of some tokens."""

    READS = ("parts",)
    WRITES = ("parts",)

    parts: tuple[str, ...]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Logits(Op):
    """`out = x · wᵀ + bias` in float32, and what adapters add. Each TP rank has columns of its own."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight", "bias")

    x: str
    out: str
    vocab: int
    """Columns of all ranks."""

    weight: str = "head"
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Cap(Op):
    """`x = cap · tanh(x · scale / cap)`; without a cap, x is scaled."""

    READS = ("x",)
    WRITES = ("x",)

    x: str
    scale: float = 1.0
    cap: float | None = None
