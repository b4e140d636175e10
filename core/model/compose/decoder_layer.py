"""The layer that most families have, and hooks for those which have an idea of their own.

Tests: tests/core/model/program/test_golden.py, tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..program.ops.residual import AddMedia, Replace
from ..specs.attention import AttentionSpec
from ..specs.feed_forward import Experts, GatedSpec, UngatedSpec
from ..specs.layers import LayerSpec
from ..specs.norms import BEHIND, PARALLEL, Norms
from ..specs.recurrent import RecurrentSpec
from .attention import attention_in, attention_out
from .build import Build, Value
from .latents import latent_in, latent_out
from .mixers import mix, mixer_in, mixer_out
from .mixtures import mixture
from .parts import dense

#: Norms that a layer has around its parts, by where they stand.
_AROUND = {
    Norms.BEFORE: ("attention_norm", "mlp_norm"),
    Norms.AFTER: ("attention_out_norm", "mlp_out_norm"),
    Norms.AROUND: ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"),
    Norms.AFTER_MLP: ("attention_norm", "mlp_norm", "mlp_out_norm"),
    Norms.PARALLEL: ("attention_norm",),
    Norms.BEHIND: ("attention_out_norm", "mlp_out_norm"),
    Norms.BEHIND_MIXER: ("attention_out_norm",),
    Norms.PARALLEL_TWO_NORMS: ("attention_norm", "mlp_norm"),
    Norms.NONE: (),
}


@dataclass(frozen=True)
class DecoderLayer(LayerSpec):
    """A mixer and a feed-forward part, or one of them, with norms around them, added to the residual stream.

    A family with an idea overrides the method that is about it.
    """

    def build(self, b: Build) -> None:
        """Write it."""
        if self.mixer is not None:
            self.mixer_part(b)
        if self.feed_forward is not None and (self.mixer is None or self.norms not in PARALLEL):
            with b.span("mlp"):
                y = self.out(b, "mlp_out_norm", self.part(b, self.normed(b, "mlp_norm", b.x)))
            self.add(b, "mlp_out_norm", y)
        self.end(b)

    def mixer_part(self, b: Build) -> None:
        """Write the mixer, and a feed-forward part that reads the same."""
        mixer = self.mixer
        assert mixer is not None, "the layer has a mixer"
        n = self.normed(b, "attention_norm", b.x)
        if self.norms not in PARALLEL:
            self.add(b, "attention_out_norm", self.out(b, "attention_out_norm", self.mixed(b, n)))
            return
        x = self.inputs(b, mixer, n)
        rows = n if self.norms is Norms.PARALLEL else self.normed(b, "mlp_norm", b.x)
        self.add(b, "mlp_out_norm", self.out(b, "mlp_out_norm", self.part(b, rows)))
        y = b.reduce(self.outputs(b, mixer, x, n))
        self.add(b, "attention_out_norm", self.out(b, "attention_out_norm", y))

    # ---- hooks

    def has(self, norm: str) -> bool:
        """True if the layer has a norm of this name."""
        return norm in _AROUND[self.norms]

    def normed(self, b: Build, name: str, x: Value) -> Value:
        """What a part reads of x."""
        return b.norm(name, x) if self.has(name) else x

    def mixed(self, b: Build, n: Value) -> Value:
        """What the mixer gives, of its normalised input."""
        mixer = self.mixer
        assert mixer is not None, "the layer has a mixer"
        return b.reduce(self.outputs(b, mixer, self.inputs(b, mixer, n), n))

    def inputs(self, b: Build, mixer: AttentionSpec | RecurrentSpec, n: Value) -> Value:
        """What a mixer's first product gives."""
        if isinstance(mixer, RecurrentSpec):
            return mixer_in(b, mixer, n)
        return self.attention_in(b, mixer, n)

    def outputs(self, b: Build, mixer: AttentionSpec | RecurrentSpec, x: Value, n: Value) -> Value:
        """What it gives of that, which ranks must sum. n: its normalised input."""
        if isinstance(mixer, RecurrentSpec):
            return mixer_out(b, mixer, mix(b, mixer, x))
        return self.attention_out(b, mixer, x, n)

    def attention_in(self, b: Build, a: AttentionSpec, n: Value) -> Value:
        """See `inputs`."""
        return attention_in(b, a, n) if a.latent is None else latent_in(b, a, n)

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `outputs`."""
        return attention_out(b, a, x) if a.latent is None else latent_out(b, a, x, n)

    def part(self, b: Build, rows: Value) -> Value:
        """What the feed-forward part gives."""
        part = self.feed_forward
        assert part is not None, "the layer has a feed-forward part"
        return self.mixture_part(b, part, rows) if isinstance(part, Experts) else self.dense_part(b, part, rows)

    def dense_part(self, b: Build, spec: GatedSpec | UngatedSpec, rows: Value) -> Value:
        """See `part`."""
        return dense(b, spec, rows)

    def mixture_part(self, b: Build, spec: Experts, rows: Value) -> Value:
        """See `part`."""
        return mixture(b, spec, rows)

    def out(self, b: Build, name: str, y: Value) -> Value:
        """What a part adds. name: of the norm of what parts give."""
        if self.has(name) and self.norms not in BEHIND:
            y = self.out_norm(b, name, y)
        return b.scale(y, self.residual_multiplier)

    def out_norm(self, b: Build, name: str, y: Value) -> Value:
        """The norm of what a part gives."""
        return b.norm(name, y, y)

    def add(self, b: Build, name: str, y: Value) -> None:
        """Add to the residual stream, whose own norm may stand behind. name: see `out`."""
        b.add(y)
        if self.has(name) and self.norms in BEHIND:
            b.put(Replace(b.x, b.norm(name, b.x)), b.hidden)

    def end(self, b: Build) -> None:
        """Write what follows the layer's parts."""
        if self.media_part:
            b.put(AddMedia(b.x, self.media_part), b.hidden)
