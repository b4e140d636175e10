"""Zamba and Zamba 2: before a layer's mixer, a block of attention and a gated part, whose weights layers share.

Tests: tests/core/layers/test_shared_blocks.py
"""

from __future__ import annotations

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
from ...specs.recurrent import RecurrentSpec
from .ops import CopyEmbeddings
from .shared_block import SharedBlock


@dataclass(frozen=True, kw_only=True)
class ZambaLayer(DecoderLayer):
    """See `SharedBlock`. Attention comes first, then the mixer: the program has two segments."""

    shared: SharedBlock

    @property
    def invocation(self) -> int:
        """See `LayerSpec.invocation`."""
        return self.shared.invocation

    @property
    def recurrent(self) -> RecurrentSpec:
        """See `LayerSpec.recurrent`."""
        return self.shared.mixer

    @property
    def num_parts(self) -> int:
        """See `LayerSpec.num_parts`."""
        return 3

    def _shares(self, size: int) -> dict[str, Any]:
        return {"shared": self.shared.share(size)}

    def begin(self, b: Build) -> None:
        """See `LayerSpec.begin`."""
        b.put_all(CopyEmbeddings(), b.lasting(EMBEDDED, b.hidden))

    def build(self, b: Build) -> None:
        """See `DecoderLayer.build`."""
        block, a, dense = self.shared, self.attention, self.dense
        assert a is not None and isinstance(dense, GatedSpec), "a block has both"
        y = self._block_part(b, block, dense, self._attended(b, block, a))
        t = b.sum(b.x, b.linear("block_out", y, "t", Proj("linear", b.hidden)), "xt")
        own, path = block.mixer, block.mixer_path
        r = mixer_in(b, own, b.norm("mixer_norm", t), "mixer_in", "r", path)
        b.add(b.reduce(mixer_out(b, own, mix(b, own, r, "m", path), "mixer_out", "z", path)))

    def _attended(self, b: Build, block: SharedBlock, a: AttentionSpec) -> Value:
        with b.shared_with(block.first):
            n = b.norm("block_norm", b.concat("xe", b.x, Value(EMBEDDED, b.hidden)))
            x = attention_in(b, a, n)
        if block.heads_rank:
            with b.stored_in(block.first):
                x = b.sum(x, _own_heads(b, a, n, block.heads_rank), "in")
        with b.shared_with(block.first):
            q, _ = heads(b, a, x)
            return b.reduce(project(b, a, attend(b, a, q)))

    def _block_part(self, b: Build, block: SharedBlock, dense: GatedSpec, y: Value) -> Value:
        with b.span("mlp"):
            with b.shared_with(block.first):
                rows = b.norm("mlp_norm", y)
                gu = gate_up(b, dense, rows, is_alone=not block.mlp_rank)
            if block.mlp_rank:
                with b.stored_in(block.first):
                    low = b.linear("invocation_mlp_down", rows, "low", Proj("mlp.invocation_down", block.mlp_rank))
                    up = Proj("mlp.invocation_up", 2 * dense.size, dense.size, sections=(dense.size, dense.size))
                    gu = b.sum(gu, b.linear("invocation_mlp_up", low, "gl", up), "gu")
            with b.shared_with(block.first):
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
