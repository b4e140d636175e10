"""The specification of real-gated linear recurrent units (RG-LRU).

Tests: tests/core/model/specs/test_recurrent_specs.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...specs.products import Proj
from ...specs.recurrent import MixerTensor, RecurrentSpec, conv_tensors, taps

if TYPE_CHECKING:
    import torch

    from .....ops.library.native_model import NativeShape
    from .....ops.mixers.recurrent import RecurrentWeights


@dataclass(frozen=True, slots=True)
class RgLruSpec(RecurrentSpec):
    """RG-LRU behind a short convolution, beside gates (Griffin, arXiv 2402.19427); see `ops.mixers.rg_lru`."""

    title: ClassVar[str] = "RG-LRU"
    marks_first: ClassVar[bool] = True

    num_heads: int
    """Heads of units; each head's gates are made of its own inputs."""

    head_dim: int
    conv_size: int = 4

    @property
    def channels(self) -> int:
        """See `RecurrentSpec.channels`."""
        return self.num_heads * self.head_dim

    @property
    def in_size(self) -> int:
        """Width of the input product: y, then x."""
        return 2 * self.channels

    @property
    def recurrent_shape(self) -> tuple[int, int]:
        """See `RecurrentSpec.recurrent_shape`."""
        return self.num_heads, self.head_dim

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`."""
        heads, width = self.num_heads, self.head_dim
        units, each = ((self.channels, heads),), ((heads, heads),)
        gates = {
            f"temporal.rg_lru.{gate}_gate_{part}": MixerTensor(shape, each)
            for gate in ("input", "recurrent")
            for part, shape in (("weight", (heads, width, width)), ("bias", (heads, width)))
        }
        return {
            **conv_tensors("temporal.conv_1d", self, units, bias=True),
            "temporal.rg_lru.recurrent_param": MixerTensor((self.channels,), units),
            **gates,
        }

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights:
        """See `RecurrentSpec.weights`."""
        import torch

        from .....ops.mixers.rg_lru import RgLruWeights

        found = {name.split(".")[-1]: it for name, it in tensors.items()}
        return RgLruWeights(
            taps(tensors["temporal.conv_1d.weight"]),
            tensors["temporal.conv_1d.bias"],
            torch.stack((found["input_gate_weight"], found["recurrent_gate_weight"])),
            torch.stack((found["input_gate_bias"], found["recurrent_gate_bias"])),
            8 * torch.nn.functional.softplus(found["recurrent_param"]),
        )

    def products(self, hidden: int) -> Mapping[str, tuple[Proj, ...]]:
        """See `RecurrentSpec.products`."""
        own = (Proj(f"temporal.linear_{each}", self.channels, self.num_heads, bias=True) for each in "yx")
        return {"in": tuple(own), "out": (Proj("temporal.linear_out", hidden, self.num_heads, bias=True),)}

    def share(self, size: int) -> RgLruSpec:
        """One of `size` ranks' share."""
        return replace(self, num_heads=self.num_heads // size)

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`."""
        return f"the number of heads of units, {self.num_heads}," if self.num_heads % size else None

    def native_shape(self) -> NativeShape:
        """Heads of v, with one row of a state each."""
        from .....ops.library.native_model import NativeShape

        return NativeShape("kRgLru", 0, self.num_heads, 1, self.head_dim, self.conv_size, 0.0)

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        return f"{self.title}, with {self.num_heads} heads of {self.head_dim}"
