"""The specification of Mamba 1 by heads.

Tests: tests/ops/mixers/test_recurrent.py, tests/core/layers/test_shared_blocks.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from ...specs.products import Proj
from ...specs.recurrent import MixerTensor, RecurrentSpec, conv_tensors, taps

if TYPE_CHECKING:
    import torch

    from .....ops.library.native_model import NativeShape
    from .....ops.mixers.recurrent import RecurrentWeights

#: The most channels of a block, of which a state has a part each.
_MOST_CHANNELS = 64


@dataclass(frozen=True, slots=True)
class HeadedScanSpec(RecurrentSpec):
    """Mamba 1 by heads (Zamba); see `ops.mixers.headed_scan`."""

    title: ClassVar[str] = "Mamba 1 by heads"

    num_heads: int
    head_dim: int
    """Channels of a head: of x, and of the gate z."""

    state_size: int
    """Width of B and C."""

    rank: int
    """Width of what time steps are made of."""

    conv_size: int = 4
    conv_bias: bool = True
    bias: bool = False
    """The projections have biases."""

    @property
    def channels(self) -> int:
        """See `RecurrentSpec.channels`."""
        return self.num_heads * self.head_dim

    @property
    def in_size(self) -> int:
        """Width of the input product: x and z, whose columns alternate."""
        return 2 * self.channels

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """See `RecurrentSpec.recurrent_shape`; its heads are blocks of channels."""
        block = gcd(self.head_dim, _MOST_CHANNELS)
        return self.channels // block, self.state_size, block

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`."""
        heads, dim = self.num_heads, self.head_dim
        of_channels, of_heads = ((self.channels, heads),), ((heads, heads),)
        found = conv_tensors("mamba.conv1d", self, of_channels, bias=self.conv_bias)
        shapes = {
            "x_proj_weight": (heads, self.rank + 2 * self.state_size, dim),
            "dt_proj_weight": (heads, dim, self.rank),
            "dt_proj_bias": (heads, dim),
            "A_log": (heads, dim, self.state_size),
            "D": (heads, dim),
        }
        return found | {f"mamba.{name}": MixerTensor(shape, of_heads) for name, shape in shapes.items()}

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights:
        """See `RecurrentSpec.weights`."""
        from .....ops.mixers.headed_scan import HeadedScanWeights  # needs torch

        own = {name.removeprefix("mamba."): tensor for name, tensor in tensors.items()}
        return HeadedScanWeights(
            taps(own["conv1d.weight"]),
            own.get("conv1d.bias"),
            own["x_proj_weight"],
            own["dt_proj_weight"],
            own["dt_proj_bias"].flatten(),
            own["A_log"].exp().flatten(0, 1).T.contiguous(),
            own["D"].flatten(),
        )

    def products(self, hidden: int) -> Mapping[str, tuple[Proj, ...]]:
        """See `RecurrentSpec.products`."""
        return {
            "in": (Proj("mamba.in_proj", self.in_size, self.num_heads, self.bias),),
            "out": (Proj("mamba.out_proj", hidden, self.num_heads, self.bias),),
        }

    def share(self, size: int) -> HeadedScanSpec:
        """One of `size` ranks' share."""
        return replace(self, num_heads=self.num_heads // size)

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`."""
        return f"the number of Mamba's heads, {self.num_heads}," if self.num_heads % size else None

    def native_shape(self) -> NativeShape:
        """Heads of v are blocks of channels."""
        from .....ops.library.native_model import NativeShape

        blocks, state, block = self.recurrent_shape
        sizes = 0, blocks, state, block, self.conv_size
        return NativeShape("kHeadedScan", *sizes, 0.0, scan_heads=self.num_heads, scan_rank=self.rank)

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        heads = f"{self.num_heads} heads of {self.head_dim} by {self.state_size}"
        return f"{self.title}, with {heads}, and time steps of rank {self.rank}"
