"""LongCat-Flash: a mixture beside one layer's dense part is added behind the next layer, and some of its experts are
idle.

Tests: tests/core/layers/test_late_mixtures.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.latents import attended, latent_of, latent_queries, parts_of, take_gates
from ...compose.mixtures import mixture
from ...program.op import LATE
from ...specs.attention import AttentionSpec
from ...specs.feed_forward import Experts


@dataclass(frozen=True)
class LongCatExperts(Experts):
    """Further experts, behind the others, give their input back; transformers saves gates and ups of them."""

    idle: int = 0

    @property
    def choices(self) -> int:
        """See `Experts.choices`."""
        return self.count + self.idle

    @property
    def num_stored(self) -> int:
        """See `Experts.num_stored`."""
        return self.choices

    @property
    def why_whole(self) -> str | None:
        """See `Experts.why_whole`."""
        return "experts that give their input back would be added by every rank" if self.idle else None


@dataclass(frozen=True, kw_only=True)
class LongCatLayer(DecoderLayer):
    """A mixture beside it reads what the dense part reads, and is added behind the next layer."""

    shortcut: Experts | None = None
    """This mixture; None: it has none, and is such a next layer."""

    @property
    def experts(self) -> Experts | None:
        """See `LayerSpec.experts`."""
        return self.shortcut

    @property
    def late(self) -> Experts | None:
        """See `LayerSpec.late`."""
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
            mixture(b, self.shortcut, rows, b.lasting(LATE, b.hidden))
        return super().part(b, rows)

    def end(self, b: Build) -> None:
        """See `DecoderLayer.end`."""
        if self.shortcut is None:
            b.add(Value(LATE, b.hidden))
        super().end(b)
