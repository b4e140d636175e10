"""LongCat-Flash: shortcut-connected experts, whose output is added after the next layer; some are identity experts.

Tests: tests/core/layers/test_shortcut_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.latents import attended, latent_of, latent_queries, parts_of, take_gates
from ...compose.mixtures import mixture
from ...specs.attention import AttentionSpec
from ...specs.feed_forward import Experts

#: The output of shortcut-connected experts `[tokens, hidden]`, until the end of the next layer.
SHORTCUT = "shortcut"


@dataclass(frozen=True)
class LongCatExperts(Experts):
    """The last experts may be identity (zero-computation) experts, which give their input back."""

    identity: int = 0
    """Identity experts; transformers saves gates and ups of them, too, which nothing reads."""

    @property
    def choices(self) -> int:
        """See `Experts.choices`."""
        return self.count + self.identity

    @property
    def num_stored(self) -> int:
        """See `Experts.num_stored`."""
        return self.choices

    @property
    def why_whole(self) -> str | None:
        """See `Experts.why_whole`."""
        return "identity experts would be added by every rank" if self.identity else None


@dataclass(frozen=True, kw_only=True)
class LongCatLayer(DecoderLayer):
    """Shortcut-connected experts (ScMoE, arXiv 2404.05019) read what the dense part reads. Their output is added after
    the next layer.
    """

    shortcut: Experts | None = None
    """These experts; None: the layer has none, and is such a next layer."""

    @property
    def experts(self) -> Experts | None:
        """See `LayerSpec.experts`."""
        return self.shortcut

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`. transformers multiplies queries by the factor that their latents have here: an
        adapter's bias of queries has it, too.
        """
        own = parts_of(a, x)
        queries = latent_queries(b, a, own, n, bias_factor=latent_of(a).q_factor)
        return attended(b, a, queries, own.kept, take_gates(b, a, own.gates))

    def _shares(self, size: int) -> dict[str, Any]:
        return {"shortcut": None if self.shortcut is None else self.shortcut.share(size)}

    def part(self, b: Build, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        if self.shortcut is not None:
            mixture(b, self.shortcut, rows, b.lasting(SHORTCUT, b.hidden))
        return super().part(b, rows)

    def end(self, b: Build) -> None:
        """See `DecoderLayer.end`."""
        if self.shortcut is None:
            b.add(Value(SHORTCUT, b.hidden))
        super().end(b)
