"""Zamba and Zamba 2: before a layer's mixer, a block of attention and a gated part, whose weights layers share.

Tests: tests/core/layers/test_shared_blocks.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...compose.attention import attend, attention_in, heads, heads_in, project
from ...compose.build import Build, Proj, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.mixers import mix, mixer_in, mixer_out
from ...compose.parts import activated, down, gate_up
from ...program.op import EMBEDDED, View
from ...specs.attention import AttentionSpec
from ...specs.feed_forward import GatedSpec
from ...specs.layers import LayerSpec
from ...specs.recurrent import RecurrentSpec
from .ops import CopyEmbeddings

#: The beginning of paths of parts of the mixer, whose module is this one in transformers' classes.
_MIXER = "mamba_decoder."


@dataclass(frozen=True, kw_only=True)
class ZambaLayer(DecoderLayer):
    """A layer with a block of attention and a feed-forward part before its recurrent mixer (arXiv 2405.16712 §2 and
    2411.15242 §2). Attention comes first, then the mixer: the program has two segments.

    The block reads the residual stream x next to the token's embedding e, and adds to what the mixer reads, not to x:

        h = attention(norm([x, e]))
        x += behind(norm(x + linear(feed_forward(norm(h)))))

    Several layers have the same block, and share its weights. Each has its own `linear`, and its own low-rank pairs,
    which are added to the block's input projections (LoRA of an invocation).
    """

    behind: RecurrentSpec
    """The recurrent mixer."""

    first: int
    """The first layer with this block, where checkpoints have its weights, and the low-rank pairs of all its layers."""

    number: int
    """See `LayerSpec.invocation`."""

    heads_rank: int = 0
    """Rank of the pairs of q_proj, k_proj and v_proj; 0: there are none."""

    mlp_rank: int = 0
    """Rank of the pair of gate and up; 0: there is none."""

    @classmethod
    def told(cls, layers: Sequence[LayerSpec]) -> list[str]:
        """See `LayerSpec.told`."""
        blocks = {layer.first for layer in layers if isinstance(layer, cls)}
        shared = f"{len(blocks)} blocks of attention and a feed-forward part"
        return [f"{len(layers)} of them are behind one of {shared}, whose weights they share"]

    @property
    def invocation(self) -> int:
        """See `LayerSpec.invocation`."""
        return self.number

    @property
    def recurrent(self) -> RecurrentSpec:
        """See `LayerSpec.recurrent`."""
        return self.behind

    @property
    def num_parts(self) -> int:
        """See `LayerSpec.num_parts`."""
        return 3

    def _shares(self, size: int) -> dict[str, Any]:
        return {"behind": self.behind.share(size)}

    def begin(self, b: Build) -> None:
        """See `LayerSpec.begin`."""
        b.put_all(CopyEmbeddings(), b.lasting(EMBEDDED, b.hidden))

    def build(self, b: Build) -> None:
        """See `DecoderLayer.build`."""
        a, dense, own = self.attention, self.dense, self.behind
        assert a is not None and isinstance(dense, GatedSpec), "a block has both"
        y = self._block_part(b, dense, self._attended(b, a))
        t = b.sum(b.x, b.linear("block_out", y, "t", Proj("linear", b.hidden)), "xt")
        r = mixer_in(b, own, b.norm("mixer_norm", t), "mixer_in", "r", _MIXER)
        b.add(b.reduce(mixer_out(b, own, mix(b, own, r, "m", _MIXER), "mixer_out", "z", _MIXER)))

    def _attended(self, b: Build, a: AttentionSpec) -> Value:
        with b.shared_with(self.first):
            n = b.norm("block_norm", b.concat("xe", b.x, Value(EMBEDDED, b.hidden)))
            x = attention_in(b, a, n)
        if self.heads_rank:
            with b.stored_in(self.first):
                x = b.sum(x, _own_heads(b, a, n, self.heads_rank), "in")
        with b.shared_with(self.first):
            q, _ = heads(b, a, x)
            return b.reduce(project(b, a, attend(b, a, q)))

    def _block_part(self, b: Build, dense: GatedSpec, y: Value) -> Value:
        with b.span("mlp"):
            with b.shared_with(self.first):
                rows = b.norm("mlp_norm", y)
                gu = gate_up(b, dense, rows, is_alone=not self.mlp_rank)
            if self.mlp_rank:
                with b.stored_in(self.first):
                    low = b.linear("invocation_mlp_down", rows, "low", Proj("mlp.invocation_down", self.mlp_rank))
                    up = Proj("mlp.invocation_up", 2 * dense.size, dense.size, sections=(dense.size, dense.size))
                    gu = b.sum(gu, b.linear("invocation_mlp_up", low, "gl", up), "gu")
            with b.shared_with(self.first):
                return down(b, dense, activated(b, dense, gu))


def _own_heads(b: Build, a: AttentionSpec, n: Value, rank: int) -> Value:
    """What the layer's own low-rank pairs add to queries, keys and values."""
    low = b.linear(
        "invocation_heads_down", n, "low", *(Proj(f"self_attn.{each}_invocation_down", rank) for each in "qkv")
    )
    parts: list[Value] = []
    for at, (name, own) in enumerate(zip(("query", "key", "value"), heads_in(a), strict=True)):
        part, up = View(low, at * rank, (at + 1) * rank, copied=True), f"self_attn.{name[0]}_invocation_up"
        parts.append(b.linear(f"invocation_{name}_up", part, f"{name[0]}u", Proj(up, own.outputs, own.units)))
    return b.concat("low", *parts)
