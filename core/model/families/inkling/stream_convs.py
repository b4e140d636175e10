"""Specification of short convolutions of streams (Inkling).

Tests: tests/ops/mixers/test_stream_convs.py, tests/core/layers/test_stream_convs.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from .....ops.mixers.conv_place import ConvPlace
from ...specs.recurrent import MixerTensor, RecurrentSpec, taps

if TYPE_CHECKING:
    import torch

    from .....ops.mixers.stream_convs import StreamConvs


@dataclass(frozen=True, slots=True)
class StreamConvSpec(RecurrentSpec):
    """Convolutions of keys and values, and of what attention and the feed-forward part give (Inkling).

    See `ops.mixers.stream_convs`. Layers may differ in the width of keys; their states have room for the widest.
    """

    title: ClassVar[str] = "short convolutions of streams"

    hidden: int

    heads: tuple[tuple[int, int], ...]
    """Of each form of layers, the number of heads of keys and their width."""

    form: int = 0
    """The layer's, among these."""

    conv_size: int = 4

    @property
    def kv_size(self) -> int:
        """Width of the layer's keys."""
        count, width = self.heads[self.form]
        return count * width

    @property
    def kv_room(self) -> int:
        """Channels for keys, and as many for values."""
        return max(count * width for count, width in self.heads)

    @property
    def common(self) -> StreamConvSpec:
        """See `RecurrentSpec.common`."""
        return replace(self, form=0)

    @property
    def channels(self) -> int:
        """Channels of all convolutions."""
        return 2 * self.kv_room + 2 * self.hidden

    @property
    def in_size(self) -> int:
        """Width of the inputs of most of them."""
        return self.hidden

    @property
    def out_size(self) -> int:
        """See `in_size`."""
        return self.hidden

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`; every rank has all channels of the residual stream."""
        keys = MixerTensor((self.kv_size, 1, self.conv_size), ((self.kv_size, self.heads[self.form][0]),))
        whole = MixerTensor((self.hidden, 1, self.conv_size))
        return {f"{_KEYS}.weight": keys, f"{_VALUES}.weight": keys, f"{_ATTENTION}.weight": whole} | {
            f"{_FEED_FORWARD}.weight": whole
        }

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> StreamConvs:
        """See `RecurrentSpec.weights`."""
        import torch

        from .....ops.mixers.stream_convs import StreamConvs, StreamConvWeights  # needs torch

        keys, values, attention, feed_forward = (
            taps(tensors[f"{path}.weight"]) for path in (_KEYS, _VALUES, _ATTENTION, _FEED_FORWARD)
        )
        parts = torch.cat((keys, values), 1), attention, feed_forward
        firsts = 0, 2 * self.kv_room, 2 * self.kv_room + self.hidden
        every = zip(ConvPlace, parts, firsts, strict=True)
        return StreamConvs({place: StreamConvWeights(conv, first) for place, conv, first in every})

    def share(self, size: int) -> StreamConvSpec:
        """One of `size` ranks' share; several may have a copy of a head."""
        return replace(self, heads=tuple((max(1, count // size), width) for count, width in self.heads))

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`; attention's heads say all."""
        return None

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        return f"{self.title} over {self.conv_size} tokens"


_KEYS, _VALUES = "self_attn.k_sconv.conv1d", "self_attn.v_sconv.conv1d"
_ATTENTION, _FEED_FORWARD = "attn_sconv.conv1d", "mlp_sconv.conv1d"
