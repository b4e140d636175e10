"""Specifications of a model's layers: values alone, read from a checkpoint by its family and obeyed by every decoder.

A layer is a mixer of tokens (attention, or a recurrent one, see `recurrent`) and a feed-forward part (gated or not, or
a mixture of experts), each with norms around it, added to the residual stream x. With `Norms.BEFORE`:

    x += residual_multiplier · mixer(norm(x))
    x += residual_multiplier · feed_forward(norm(x))

A layer may have one of the two alone; what layers of some families have besides is in their classes, in the folders of
these families.

Tests: tests/core/model/specs/test_model_config.py, tests/core/paths
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from .attention import AttentionSpec
from .feed_forward import Experts, GatedSpec, UngatedSpec
from .norms import Norms
from .recurrent import RecurrentSpec
from .rope_config import RopeConfig

if TYPE_CHECKING:
    from ..compose.build import Build


@dataclass(frozen=True, slots=True)
class PerLayerEmbeddingSpec:
    """Per-layer embeddings: each layer gates one of the token (see `program.ends`) after its feed-forward part.

    x += norm(project(activation(gate(x)) · embedding))
    """

    size: int
    """Width of a layer's embedding."""

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


class ResidualStreams(Protocol):
    """A residual of several streams of one width."""

    @property
    def count(self) -> int:
        """Streams."""
        ...

    def num_weights(self, hidden: int, layers: int) -> int:
        """Weights of matrices that make, mix and join them, besides projections."""
        ...


@dataclass(frozen=True)
class LayerSpec(ABC):
    """One layer: frozen, equal to others of the same class and fields, and sent to ranks. See `DecoderLayer`."""

    WHY_WHOLE: ClassVar[str | None] = None
    """Why ranks can't share layers of this class; None: they can, as far as their parts can be shared."""

    LACKS_ON_GPU: ClassVar[str] = ""
    """What images of a model with such layers do in them, and steps on GPUs don't compute; empty: nothing."""

    VERB: ClassVar[str] = "are"
    """What a layer with a state does with it: it is such a mixer, or has one."""

    mixer: AttentionSpec | RecurrentSpec | None
    """None: the layer is a feed-forward part alone (Nemotron-H)."""

    feed_forward: GatedSpec | UngatedSpec | Experts | None
    """None: the layer is a mixer alone."""

    norms: Norms = Norms.BEFORE

    residual_multiplier: float = 1.0
    """Factor of each part's addition to the residual stream (Granite)."""

    media_part: int = 0
    """The part of images' rows that is added to the residual stream behind the layer; 0: none is. See `MediaRows`."""

    @abstractmethod
    def build(self, b: Build) -> None:
        """Write it."""

    @classmethod
    def told(cls, layers: Sequence[LayerSpec]) -> list[str]:
        """What `chorus models` says of this class alone, a line each. layers: all of a model that are of this class."""
        del layers
        return []

    def seeing(self) -> Self:
        """The layer where images are served."""
        return self

    def begin(self, b: Build) -> None:
        """Write what stands before all layers, once for all of this class."""
        del b

    def finish(self, b: Build) -> None:
        """Write what stands behind all layers, likewise."""
        del b

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
        """What has a state, alone, beside attention or behind a block."""
        return self.mixer if isinstance(self.mixer, RecurrentSpec) else None

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts, alone or in addition to a dense part."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None

    @property
    def dense(self) -> GatedSpec | UngatedSpec | None:
        """The feed-forward part, unless it is a mixture of experts."""
        return None if isinstance(self.feed_forward, Experts) else self.feed_forward

    @property
    def streams(self) -> ResidualStreams | None:
        """Several residual streams; None: the residual is one stream."""
        return None

    @property
    def invocation(self) -> int | None:
        """Its number among the layers with a block that layers share, by which it finds what of that is its own; None:
        it has no block.
        """
        return None

    @property
    def lookup(self) -> RecurrentSpec | None:
        """A table of n-grams, whose rows are added to the layer's streams, with a state beside that of the mixer."""
        return None

    @property
    def num_parts(self) -> int:
        """Mixers and feed-forward parts."""
        return (self.mixer is not None) + (self.feed_forward is not None)

    @property
    def why_whole(self) -> str | None:
        """Why ranks can't share it; None if they can."""
        if self.WHY_WHOLE is None and self.experts is not None:
            return self.experts.why_whole
        return self.WHY_WHOLE

    def why_not(self, size: int) -> str | None:
        """The field, with its value, that `size` ranks can't share, for a reason of this class; None: there is none."""
        del size
        return None

    def share(self, size: int) -> Self:
        """One of `size` ranks' share."""
        mixer = None if self.mixer is None else self.mixer.share(size)
        feed_forward = None if self.feed_forward is None else self.feed_forward.share(size)
        return replace(self, mixer=mixer, feed_forward=feed_forward, **self._shares(size))

    def _shares(self, size: int) -> dict[str, Any]:
        """Shares of what else a class has."""
        del size
        return {}


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
