"""Specifications of indexers, which choose the tokens, or blocks of tokens, that sparse attention attends to.

Tests: tests/core/layers/test_indexer.py, tests/core/layers/test_key_blocks.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from .products import Proj
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

    rope: RopeConfig | None
    """Rotates their first elements; None: they are not rotated."""

    eps: float
    """Of the LayerNorm of keys."""

    rotates_last: bool = False
    """The last elements rotate instead (HY V4)."""

    pool: int = 0
    """Tokens that are chosen together; 0: each by itself. A whole pool has one key: the sum of its tokens' keys, each
    element weighted by a softmax over them of `gate[s] + bias`. Gates are made of the layer's input and kept next to
    keys, and biases are learned, of each place of a pool. The tokens behind the last whole pool are attended to in any
    case (GLM-5.3-Flash).
    """

    @property
    def kept_dim(self) -> int:
        """Elements of a token that are kept."""
        return self.key_dim * (2 if self.pool else 1)

    @property
    def query_size(self) -> int:
        """Elements of the queries of a token."""
        return self.heads * self.key_dim


@dataclass(frozen=True, slots=True)
class BlockIndexerSpec:
    """The indexer of MiniMax-M3, which stands next to grouped-query attention: the queries of a head of keys and values
    attend to some blocks of `block` tokens.

    A block's score is the highest q[t] · k[s] of its tokens s that the query t sees, and t attends to the `top` blocks
    with the highest scores. Its own block, and those right before it, `local` in all, come first. Queries q and keys k
    are made of the layer's input, and normalised; a token has one key, which is kept in its page behind the keys and
    values of all heads.
    """

    scores_means: ClassVar[bool] = False
    """A block's score is that of the mean of its keys, which are kept as they are made."""

    heads: int
    """One for each head of keys and values."""

    key_dim: int
    """Elements of its queries and keys."""

    rope: RopeConfig
    """Rotates their first elements."""

    block: int
    top: int
    local: int

    @property
    def query_size(self) -> int:
        """Elements of the queries of a token."""
        return self.heads * self.key_dim

    @property
    def top_k(self) -> int:
        """Tokens of all blocks that are chosen."""
        return self.block * self.top

    @property
    def scored_by(self) -> str:
        """By what blocks are chosen, for users."""
        return f"the highest score of each, first the last {self.local}"

    @property
    def products(self) -> tuple[Proj, ...]:
        """Its projections of the layer's input: queries, then a token's key."""
        at = "self_attn.indexer"
        return Proj(f"{at}.q_proj", self.query_size, self.heads), Proj(f"{at}.k_proj", self.key_dim)

    def share(self, size: int) -> BlockIndexerSpec:
        """One of `size` ranks' share."""
        return replace(self, heads=max(1, self.heads // size))
