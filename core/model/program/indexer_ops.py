"""Ops of indexers, which choose the tokens, or blocks of tokens, that queries attend to.

Tests: tests/core/layers/test_indexer.py, tests/core/layers/test_key_blocks.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.attention import AttentionSpec
from ..specs.indexer import BlockIndexerSpec, IndexerSpec
from ..specs.norms import NormSpec
from .ops import Op, Read


@dataclass(frozen=True, slots=True)
class Index(Op):
    """Rotate an indexer's queries; normalise and rotate the key that its heads share, and write it to its page.

    x: queries `[tokens, heads · key]`; key: `[tokens, key]`; factors: of heads `[tokens, heads]`, which are copied.
    rows: the layer's input, of which gates are made that are kept next to keys: see `IndexerSpec.pool`.
    """

    READS = ("x", "key", "factors", "rows")
    WRITES = ("q", "weights")
    SLOTS = ("norm", "gates")

    x: Read
    key: Read
    factors: Read
    q: str
    weights: str
    indexer: IndexerSpec
    norm: str = "index_norm"
    rows: Read | None = None
    gates: str | None = None


@dataclass(frozen=True, slots=True)
class Choose(Op):
    """The places of the tokens that an indexer gives the highest scores, `[tokens, top_k]`, for each query."""

    READS = ("q", "weights")
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("biases",)

    q: str
    weights: str
    out: str
    attention: AttentionSpec

    biases: str | None = None
    """Of places in pools: see `IndexerSpec.pool`."""


@dataclass(frozen=True, slots=True)
class IndexBlocks(Op):
    """Normalise and rotate a block indexer's queries, and the key of all its heads, and write that to its page; keys as
    they are made where blocks' means are scored.

    x: queries `[tokens, heads · key]`; key: `[tokens, key]`.
    """

    READS = ("x", "key")
    WRITES = ("q",)
    SLOTS = ("q_norm", "k_norm")

    x: Read
    key: Read
    q: str
    attention: AttentionSpec
    indexer: BlockIndexerSpec
    norm: NormSpec
    q_norm: str = "index_q_norm"
    k_norm: str = "index_k_norm"


@dataclass(frozen=True, slots=True)
class ChooseBlocks(Op):
    """The blocks that a block indexer gives the highest scores, `[tokens, heads, top]`, for the queries of each
    head of keys and values. k_norm: of the means of blocks' keys, where these are what is scored.
    """

    READS = ("q",)
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("k_norm",)

    q: str
    out: str
    attention: AttentionSpec
    indexer: BlockIndexerSpec
    norm: NormSpec
    k_norm: str | None = None
