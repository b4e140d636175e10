"""Specifications of a model's layers: values alone, read from a checkpoint by its family and obeyed by every decoder.

A layer is a mixer of tokens (attention, or a recurrent one, see `recurrent`) and a feed-forward part (gated or not, or
a mixture of experts), each with norms around it, added to the residual stream x. With `Norms.BEFORE`:

    x += residual_multiplier · mixer(norm(x))
    x += residual_multiplier · feed_forward(norm(x))

A layer may have one of the two alone, two mixers side by side (see `MixerBeside`), or both before a mixer (see
`SharedBlock`).

Tests: tests/core/model/specs/test_model_config.py, tests/core/paths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from .attention import AttentionSpec
from .feed_forward import Experts, GatedSpec, UngatedSpec
from .gated_streams import GatedStreamsSpec
from .head_conv import HeadConvSpec
from .hyper_connections import HyperConnectionSpec
from .ngrams import NgramSpec
from .norms import NormGates, Norms
from .recurrent import RecurrentSpec
from .rope_config import RopeConfig
from .shared_block import SharedBlock
from .stream_convs import StreamConvSpec


@dataclass(frozen=True, slots=True)
class LayerInputSpec:
    """Each layer gates a further input of a token (see `program.ends`), behind its feed-forward part.

    x += norm(project(activation(gate(x)) · input))
    """

    size: int
    """Width of a layer's input."""

    vocab: int
    """Rows of the table."""

    first_for_others: bool = False
    """Tokens beyond the table have its first row (Gemma 3n)."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Tokens of images or of sound, whose embeddings a module of their own makes of its rows (Gemma 3n):
    `norm(project(norm(row)))`, where the outer norm has no weights.
    """

    module: str
    """Its name beside the text part, such as `embed_vision`."""

    first: int
    """The first token."""

    count: int
    rows: int
    """Rows of the module's table, of which the first are the tokens'."""

    width: int
    """Elements of a row."""

    eps: float


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """The residual is several streams of one width: a layer computes one of them, and predicts and corrects the others
    (AltUp, arXiv 2301.13310; Gemma 3n). See `streams`.
    """

    count: int

    active: int
    """The stream that layers compute."""

    rank: int
    """Width between the two matrices of what a layer adds beside attention, `n + norm(up(down(n)))` of attention's
    input n (LAuReL, arXiv 2411.07501).
    """

    scaled: bool = True
    """The active stream is multiplied by learned numbers where it gates the layer's further input."""

    @property
    def made(self) -> int:
        """Streams that matrices of the model make of the first one, and that others join with it."""
        return self.count - 1

    def num_weights(self, hidden: int, layers: int) -> int:
        """Weights of the model's own matrices."""
        del layers
        return 2 * self.made * hidden**2


@dataclass(frozen=True, slots=True)
class MixerBeside:
    """A recurrent mixer beside attention (Falcon-H1).

    Both read one norm n of the residual stream, and are added:

        attention_out · attention(attention_in · n) + out_factor · mixer(in_factor · n)

    None of the factors may be part of a weight: adapters change both sides of the product, and biases come after it.
    """

    mixer: RecurrentSpec
    in_factor: float = 1.0
    out_factor: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0

    section_factors: tuple[float, ...] = ()
    """Of the sections of the input projection's outputs (see `Projection.sections`); empty: they have none."""

    def share(self, size: int) -> MixerBeside:
        """One of `size` ranks' share."""
        return replace(self, mixer=self.mixer.share(size))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer."""

    mixer: AttentionSpec | RecurrentSpec | None
    """None: the layer is a feed-forward part alone (Nemotron-H)."""

    feed_forward: GatedSpec | UngatedSpec | Experts | None
    """None: the layer is a mixer alone."""

    norms: Norms = Norms.BEFORE

    residual_multiplier: float = 1.0
    """Factor of each part's addition to the residual stream (Granite)."""

    scaled: bool = False
    """The residual stream is multiplied by a learned number behind the layer (Gemma 4)."""

    input_size: int = 0
    """See `LayerInputSpec.size`; 0: the layer has no further input."""

    beside: Experts | None = None
    """A mixture of experts beside a gated feed-forward part (Gemma 4). The mixture reads the residual stream r through
    a norm of its own, its router through another one; with `Norms.AROUND`:

        x += norm_out(norm_1(feed_forward(norm(r))) + norm_2(experts(norm_3(r))))
    """

    is_late: bool = False
    """The mixture beside reads what the gated part reads, and is added behind the next layer (LongCat-Flash)."""

    takes_late: bool = False
    """It adds the mixture beside the layer before, at its end."""

    mixer_beside: MixerBeside | None = None
    """A second mixer of a layer with attention."""

    convs: StreamConvSpec | HeadConvSpec | None = None
    """Short convolutions beside attention, of its keys and values and of what parts add (Inkling), or of its queries
    and keys (ZAYA). Such a layer is whole.
    """

    block: SharedBlock | None = None
    """The layer's attention and its gated feed-forward part are a block before its mixer."""

    scales_residual: bool = False
    """What a part adds and the residual stream have learned factors and summands of each element: see
    `program.factor_ops.AddScaled` (ZAYA).
    """

    takes_routed: bool = False
    """What its mixture's router begins with goes on from the layer before: see `Experts.router_size`."""

    media_part: int = 0
    """The part of images' rows that is added to the residual stream behind the layer; 0: none is. See `MediaRows`."""

    lookup: NgramSpec | None = None
    """A table whose rows are added to the layer's streams, before its parts (Qwen4-Exp)."""

    joins: bool = False
    """Its streams are joined behind it: see `GatedStreamsSpec`."""

    streams: StreamsSpec | HyperConnectionSpec | GatedStreamsSpec | None = None
    """None: the residual is one stream. A layer of several is whole; with a `StreamsSpec` it has `Norms.AROUND` and a
    further input.
    """

    scales_first: bool = False
    """With `Norms.AROUND`: `x += bare(mixer(norm(x))); x += bare(w · feed_forward(norm_2(x)))`, where bare norms have
    no weights (Muse Spark).
    """

    residual_temperature: float | None = None
    """The residual stream and what parts add have learned factors, see `program.factor_ops.AddGated`; None: they have
    none (Muse Spark).
    """

    out_eps: float | None = None
    """Of the norms of what its parts add; None: that of the others (Muse Glimmer)."""

    norm_gates: NormGates | None = None
    """Gates of the outputs of norms before its parts; None: there are none."""

    @property
    def is_whole(self) -> bool:
        """True if it has a mixer and a feed-forward part."""
        return self.mixer is not None and self.feed_forward is not None

    @property
    def attention(self) -> AttentionSpec | None:
        """The mixer, if it is attention."""
        return self.mixer if isinstance(self.mixer, AttentionSpec) else None

    @property
    def rope(self) -> RopeConfig | None:
        """The rope of its attention, if it has either."""
        return self.mixer.rope if isinstance(self.mixer, AttentionSpec) else None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The mixer with a state, alone, beside attention or behind a block; or convolutions."""
        if self.convs is not None:
            return self.convs
        if (own := self.mixer_beside or self.block) is not None:
            return own.mixer
        return self.mixer if isinstance(self.mixer, RecurrentSpec) else None

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts, alone or in addition to a gated part."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else self.beside

    @property
    def dense(self) -> GatedSpec | UngatedSpec | None:
        """The feed-forward part, unless it is a mixture of experts."""
        return None if isinstance(self.feed_forward, Experts) else self.feed_forward

    @property
    def why_whole(self) -> str | None:
        """Why ranks can't share it; None if they can."""
        if self.has_inner_norms:
            return "norms inside of attention and of feed-forward parts are of what all ranks have together"
        if (spec := self.experts) is not None and spec.latent is not None and spec.latent.eps is not None:
            return "each expert's output is normalised, of which all ranks together have the sum"
        if self.attention is not None and self.attention.difference is not None:
            return "heads are subtracted from others, which other ranks would have"
        if self.experts is not None and self.experts.idle:
            return "experts that give their input back would be added by every rank"
        if isinstance(self.convs, HeadConvSpec):
            return "half of all heads' values are those of the token before, which other ranks would have"
        if isinstance(self.streams, GatedStreamsSpec):
            return "gates of several streams and tables of n-grams are made of all streams"
        return None

    @property
    def has_inner_norms(self) -> bool:
        """True if a norm stands inside of attention or of the feed-forward part."""
        in_part = isinstance(self.dense, GatedSpec) and self.dense.inner_norm
        return in_part or (self.attention is not None and self.attention.inner_norm)

    def share(self, size: int) -> LayerSpec:
        """One of `size` ranks' share."""
        return replace(
            self,
            mixer=None if self.mixer is None else self.mixer.share(size),
            feed_forward=None if self.feed_forward is None else self.feed_forward.share(size),
            beside=None if self.beside is None else self.beside.share(size),
            mixer_beside=None if self.mixer_beside is None else self.mixer_beside.share(size),
            convs=None if self.convs is None else self.convs.share(size),
            block=None if self.block is None else self.block.share(size),
        )


def ropes_of(layers: Sequence[LayerSpec]) -> list[RopeConfig]:
    """The different ropes of layers, and of their indexers."""
    mixers = [layer.attention for layer in layers if layer.attention is not None]
    both = (each for mixer in mixers for each in (mixer.indexer, mixer.block_indexer))
    indexers = (each.rope for each in both if each is not None)
    own = (mixer.rope for mixer in mixers)
    return list(dict.fromkeys(each for each in (*own, *indexers) if each is not None))


def has_axes(layers: Sequence[LayerSpec]) -> bool:
    """True if positions of images stand on axes: see `axis_positions`."""
    return any(rope.axes for rope in ropes_of(layers))


def kv_index(layers: Sequence[LayerSpec]) -> list[int]:
    """For each layer the place of its KV among the layers with KV of their own; of others that of the one before."""
    found, last = [], {}
    for mixer, own in zip((layer.attention for layer in layers), page_index(layers), strict=True):
        if mixer is not None and not mixer.shares_kv:
            last[mixer.form] = own
        found.append(own if mixer is None else last[mixer.form])
    return found


def page_index(layers: Sequence[LayerSpec]) -> list[int]:
    """For each layer its place among the layers of which pages keep something; of others that of the one before."""
    mixers = (layer.attention for layer in layers)
    return list(accumulate((mixer is not None and mixer.has_pages for mixer in mixers), initial=-1))[1:]
