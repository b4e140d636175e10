"""Ops of a mixture of attention heads: see `QueryExperts`.

Tests: tests/core/layers/test_query_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.attention import AttentionSpec
from ..specs.query_experts import QueryExperts
from .ops import Op, Read


@dataclass(frozen=True, slots=True)
class QueriesOfExperts(Op):
    """Queries of the experts that logits choose, `[tokens, heads · head_dim]`: those of one head of keys and values
    side by side.

    chosen: `[tokens, per_token]`, the experts of each token, and their weights.
    """

    READS = ("x", "logits")
    WRITES = ("out", "chosen", "weights")
    SLOTS = ("experts",)

    x: Read
    logits: Read
    out: str
    chosen: str
    weights: str
    attention: AttentionSpec
    spec: QueryExperts
    experts: str = "query_experts"


@dataclass(frozen=True, slots=True)
class OutputsOfExperts(Op):
    """The weighted sum of what chosen experts make of attention's output x, with a bias."""

    READS = ("x", "chosen", "weights")
    WRITES = ("out",)
    SLOTS = ("experts",)

    x: str
    chosen: str
    weights: str
    out: str
    attention: AttentionSpec
    spec: QueryExperts
    experts: str = "query_experts"
    bias: str = "outputs_bias"
