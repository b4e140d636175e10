"""The specification of a block of attention and a feed-forward part whose weights several layers share.

Tests: tests/core/layers/test_shared_blocks.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...specs.recurrent import RecurrentSpec

#: The module around the mixer of a layer with a block, in transformers' classes.
_MIXER = "mamba_decoder"


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A block before a layer's recurrent mixer (Zamba, arXiv 2405.16712 §2; Zamba 2, 2411.15242 §2).

    It reads the residual stream x next to the token's embedding e, and adds to what the mixer reads, not to x:

        h = attention(norm([x, e]))
        x += mixer(norm(x + linear(feed_forward(norm(h)))))

    The layer's `AttentionSpec` and `GatedSpec` are the block's. All layers of a block share its weights. Each has its
    own `linear`, and its own low-rank pairs, which are added to the block's input projections (LoRA of an invocation).
    """

    mixer: RecurrentSpec

    first: int
    """The first layer with this block, where checkpoints have its weights, and the low-rank pairs of all its layers."""

    invocation: int
    """The layer's number among those with a block, by which it finds its low-rank pairs."""

    heads_rank: int
    """Rank of the pairs of q_proj, k_proj and v_proj; 0: there are none."""

    mlp_rank: int
    """Rank of the pair of gate and up; 0: there is none."""

    @property
    def mixer_path(self) -> str:
        """The beginning of paths of the mixer's parts."""
        return f"{_MIXER}."

    def share(self, size: int) -> SharedBlock:
        """One of `size` ranks' share."""
        return replace(self, mixer=self.mixer.share(size))
