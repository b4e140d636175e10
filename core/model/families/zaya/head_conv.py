"""The specification of convolutions of queries and keys, before attention.

Tests: tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ...specs.recurrent import MixerTensor, RecurrentSpec, taps

if TYPE_CHECKING:
    import torch

    from .....ops.mixers.recurrent import RecurrentWeights

#: Where transformers has the convolutions of a layer.
_AT = "self_attn.qkv_proj"


@dataclass(frozen=True, slots=True)
class HeadConvSpec(RecurrentSpec):
    """Makes queries, keys and values of a layer's input product, for attention behind it; see `ops.mixers.head_conv`.

    Its state is the last tokens' inputs, beside the keys and values that attention keeps.
    """

    title: ClassVar[str] = "convolutions of queries and keys"

    num_heads: int
    num_kv_heads: int
    head_dim: int

    sizes: tuple[int, int]
    """Tokens that each of the two convolutions sees, a token itself included."""

    conv_size: int = field(init=False)
    """Tokens that both see together; at least two, as half of a token's values are the last one's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv_size", max(2, sum(self.sizes) - 1))

    @property
    def kv_size(self) -> int:
        """Width of all keys, and of all values."""
        return self.num_kv_heads * self.head_dim

    @property
    def head_channels(self) -> int:
        """Channels of the convolutions: queries and keys."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def channels(self) -> int:
        """What is kept of a token: queries and keys, and the values that the next one has."""
        return self.head_channels + self.kv_size // 2

    @property
    def in_size(self) -> int:
        """Width of the input product: queries, keys, and both halves of values."""
        return self.head_channels + self.kv_size

    @property
    def out_size(self) -> int:
        """Width of queries, keys and values."""
        return self.in_size

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`."""
        channels, (first, second) = self.head_channels, self.sizes
        return {
            f"{_AT}.conv_qk_depthwise.weight": MixerTensor((channels, 1, first)),
            f"{_AT}.conv_qk_depthwise.bias": MixerTensor((channels,)),
            f"{_AT}.conv_qk_grouped.weight": MixerTensor((channels, self.head_dim, second)),
            f"{_AT}.conv_qk_grouped.bias": MixerTensor((channels,)),
            "self_attn.qk_norm.temp": MixerTensor((self.num_kv_heads,)),
        }

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights:
        """See `RecurrentSpec.weights`."""
        from .....ops.mixers.head_conv import HeadConvWeights  # needs torch

        own = {name.removeprefix(f"{_AT}."): tensor for name, tensor in tensors.items()}
        by_head = own["conv_qk_grouped.weight"].unflatten(0, (-1, self.head_dim))
        return HeadConvWeights(
            taps(own["conv_qk_depthwise.weight"]),
            own["conv_qk_depthwise.bias"],
            by_head.permute(3, 0, 2, 1).contiguous(),
            own["conv_qk_grouped.bias"],
            own["self_attn.qk_norm.temp"],
        )

    def share(self, size: int) -> HeadConvSpec:
        """All of it: see `LayerSpec.why_whole`."""
        return self

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`; `LayerSpec.why_whole` says more."""
        return None

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        first, second = self.sizes
        heads = f"{self.num_heads} heads of {self.head_dim}, {self.num_kv_heads} of keys"
        return f"{self.title}, over {first} and {second} tokens, with {heads}, half of the values delayed by a token"
