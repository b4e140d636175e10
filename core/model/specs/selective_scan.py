"""The specification of Mamba 1.

Tests: tests/core/model/specs/test_recurrent_specs.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from .norms import NormSpec
from .products import Proj
from .recurrent import Inner, MixerTensor, RecurrentSpec, conv_tensors, taps

if TYPE_CHECKING:
    import torch

    from ....ops.library.native_model import NativeShape
    from ....ops.mixers.recurrent import RecurrentWeights

#: The most channels of a block, of which a state has a part each.
_MOST_CHANNELS = 64


@dataclass(frozen=True, slots=True)
class SelectiveScanSpec(RecurrentSpec):
    """Mamba 1 (arXiv 2312.00752); see `ops.mixers.selective_scan`."""

    title: ClassVar[str] = "Mamba 1"

    size: int
    """Channels: of x, and of the gate z."""

    state_size: int
    """Width of B and C."""

    rank: int
    """Width of what time steps are made of."""

    conv_size: int = 4
    conv_bias: bool = True
    bias: bool = False
    """The projections to x and z, and from the output, have biases."""

    norm: NormSpec | None = None
    """Of what time steps are made of, of B and of C; None: there is none."""

    head_dim: int = 0
    """Channels of a block; 0: as many as `size` allows."""

    @property
    def block(self) -> int:
        """Channels of a block."""
        return self.head_dim or gcd(self.size, _MOST_CHANNELS)

    @property
    def channels(self) -> int:
        """See `RecurrentSpec.channels`."""
        return self.size

    @property
    def in_size(self) -> int:
        """Width of the input product: x, then z."""
        return 2 * self.size

    @property
    def inner(self) -> Inner:
        """See `RecurrentSpec.inner`."""
        return Inner(self.rank, self.state_size, self.norm)

    @property
    def draft_size(self) -> int:
        """Width of the convolution's inputs, then of x, dt and B."""
        return 3 * self.size + self.state_size

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """See `RecurrentSpec.recurrent_shape`; heads are blocks of channels."""
        return self.size // self.block, self.state_size, self.block

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`."""
        each = ((self.size, self.size // self.block),)
        found = conv_tensors("mamba.conv1d", self, each, bias=self.conv_bias)
        rates = MixerTensor((self.size, self.state_size), each)
        return {**found, "mamba.A_log": rates, "mamba.D": MixerTensor((self.size,), each)}

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights:
        """See `RecurrentSpec.weights`."""
        from ....ops.mixers.selective_scan import ScanInputs, SelectiveScanWeights  # needs torch

        first = ScanInputs(taps(tensors["mamba.conv1d.weight"]), tensors.get("mamba.conv1d.bias"))
        return SelectiveScanWeights(first, tensors["mamba.A_log"].exp().T.contiguous(), tensors["mamba.D"])

    def products(self, hidden: int) -> Mapping[str, tuple[Proj, ...]]:
        """See `RecurrentSpec.products`. TP ranks share blocks of channels."""
        size, blocks = self.size, self.size // self.block
        return {
            "in": (Proj("mamba.in_proj", 2 * size, blocks, self.bias, (size, size)),),
            "scan_in": (Proj("mamba.x_proj", self.rank + 2 * self.state_size, blocks),),
            "decay_up": (Proj("mamba.dt_proj", size, blocks, bias=True, is_bypassed=True),),
            "out": (Proj("mamba.out_proj", hidden, blocks, self.bias),),
        }

    def share(self, size: int) -> SelectiveScanSpec:
        """One of `size` ranks' share."""
        return replace(self, size=self.size // size, head_dim=self.block)

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`."""
        blocks = self.size // self.block
        return f"the number of Mamba's blocks of {self.block} channels, {blocks}," if blocks % size else None

    def native_shape(self) -> NativeShape:
        """Heads of v are blocks of channels."""
        from ....ops.library.native_model import NativeShape

        blocks, state, block = self.recurrent_shape
        return NativeShape("kMamba1", 0, blocks, state, block, self.conv_size, 0.0)

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        return f"{self.title}, with {self.size} channels by {self.state_size}, and time steps of rank {self.rank}"
