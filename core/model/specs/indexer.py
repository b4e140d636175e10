"""Specification of an indexer, which chooses the tokens that sparse attention attends to.

Tests: tests/core/layers/test_indexer.py
"""

from __future__ import annotations

from dataclasses import dataclass

from .rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, §2.1), which stands next to latent attention.

    Its heads score each token s for a query t:

        Σ_h weight[t, h] · heads^-0.5 · relu(q[t, h] · k[s] · key_dim^-0.5)

    and t attends to the `AttentionSpec.top_k` tokens with the highest scores among those that it sees. The queries q
    are made of the queries' latents, keys and weights of the layer's input. All heads share a token's key k, which is
    normalised, and kept in the token's page next to its latent.
    """

    heads: int

    key_dim: int
    """Elements of its queries and keys."""

    rope: RopeConfig
    """Rotates their first elements."""

    eps: float
    """Of the LayerNorm of keys."""

    rotates_last: bool = False
    """The last elements rotate instead (HY V4)."""

    @property
    def query_size(self) -> int:
        """Elements of the queries of a token."""
        return self.heads * self.key_dim
