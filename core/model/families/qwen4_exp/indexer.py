"""The specification of an indexer that chooses blocks of tokens by the means of their keys.

Tests: tests/core/layers/test_key_blocks.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...specs.indexer import BlockIndexerSpec
from ...specs.products import Proj


@dataclass(frozen=True, slots=True)
class MeanIndexerSpec(BlockIndexerSpec):
    """The indexer of Qwen4-Exp, likewise: all queries of a token attend to the same blocks, whole ones that it sees.

    A block's score is `Σ_h relu(q[t, h] · k) · key_dim^-0.5`, where k is the mean of its tokens' keys, normalised and
    rotated as its first token. The tokens behind the last whole block are attended to in any case. Keys are kept as
    they are made. `local` has no effect.
    """

    scores_means: ClassVar[bool] = True

    @property
    def top_k(self) -> int:
        """Tokens of all blocks that are chosen, and the most behind the last whole one."""
        return self.block * (self.top + 1) - 1

    @property
    def scored_by(self) -> str:
        """See `BlockIndexerSpec.scored_by`."""
        return "the mean of each, and those behind the last whole one"

    @property
    def products(self) -> tuple[Proj, ...]:
        """See `BlockIndexerSpec.products`."""
        return (Proj("self_attn.indexer.index_qk_proj", self.query_size + self.key_dim),)

    def share(self, size: int) -> MeanIndexerSpec:
        """All of it: every rank chooses the same blocks."""
        return self
