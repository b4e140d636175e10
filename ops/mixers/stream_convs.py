"""Short convolutions of streams (Inkling): of keys and values, of attention's output, and of the feed-forward part's.

Each gives, for every token's row x:

    out = x + conv(x)          causal, depthwise, over the last `conv_size` tokens

All of it is float32. A layer's convolutions have channels of one state, side by side. A draft's inputs are the rows.
See `recurrent` for the states of sequences.

Tests: tests/ops/mixers/test_stream_convs.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .conv_place import ConvPlace
from .recurrent import RecurrentState, RecurrentWeights, StatePart, convolve, convolve_tokens

if TYPE_CHECKING:
    from ..ranks.ranks import Collectives


@dataclass(slots=True)
class StreamConvWeights(RecurrentWeights):
    """One convolution."""

    conv: torch.Tensor
    """`[conv_size, channels]`: each channel's factors of a token's inputs, of the oldest first."""

    first: int
    """The first of its channels of a layer's."""

    @property
    def part(self) -> StatePart:
        """See `RecurrentWeights.part`."""
        own = slice(self.first, self.first + self.conv.shape[1])
        return StatePart(has_conv=True, has_heads=False, drafts=own, channels=own)

    def prompt(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.prompt`."""
        x = rows.float()
        return x + convolve(x, self.conv, state.conv)

    def tokens(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.tokens`."""
        x = rows.float()
        return x + convolve_tokens(x, self.conv, state.conv)

    def output(self, mixed: torch.Tensor, rows: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """See `RecurrentWeights.output`."""
        return mixed

    def draft_inputs(self, rows: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """See `RecurrentWeights.draft_inputs`."""
        return rows.float()

    def take_in(self, inputs: torch.Tensor, state: RecurrentState) -> None:
        """See `RecurrentWeights.take_in`."""
        convolve_tokens(inputs, self.conv, state.conv)

    @property
    def native_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """See `RecurrentWeights.native_tensors`: the library has no such convolutions."""
        return {}


@dataclass(slots=True)
class StreamConvs:
    """A layer's convolutions."""

    by_place: Mapping[ConvPlace, StreamConvWeights]

    def to(self, device: torch.device) -> StreamConvs:
        """The same on a device."""
        return StreamConvs({place: each.to(device) for place, each in self.by_place.items()})
