"""The specification of tables of rows for the last few tokens, which a layer adds to its residual streams.

Tests: tests/core/layers/test_gated_streams.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from .....ops.mixers.table_sizes import table_sizes
from ...specs.recurrent import MixerTensor, RecurrentSpec

if TYPE_CHECKING:
    import torch

    from .....ops.mixers.recurrent import RecurrentWeights

_CONV = "ple.conv1d.weight"

#: The table of a layer, and factors of tokens that some checkpoints have beside it.
TABLE, FACTORS = "ple.table.weight", "ple.factors"


@dataclass(frozen=True, slots=True)
class NgramSpec(RecurrentSpec):
    """Rows of a table, by the hash of a token and of those before it, enter all residual streams s of a layer
    (Qwen4-Exp); see `ops.mixers.ngrams`.

    With the rows r of a token, of all heads side by side, and norms of each stream by itself:

        g = norm(key(r)) · norm(s) / √hidden             of each stream
        x = sigmoid(sign(g) · √|g|) · value(r)
        s += x + convolved(norm(x))

    Its state stands beside that of the layer's mixer: the last tokens, and inputs of the convolution. The table stays
    in the host's memory.
    """

    title: ClassVar[str] = "tables of n-grams"

    streams: int
    hidden: int

    size: int
    """Tokens of the longest n-gram."""

    heads_per_size: int
    """Rows of a token for each n, 2 … `size`."""

    width: int
    """Elements of all rows of a token together."""

    taps: int
    """Inputs that the convolution takes, every `size`-th one."""

    vocab: int
    """Tokens that hashes are made for."""

    least_rows: int
    """The least number of rows of a head's part of the table."""

    multiple: int
    """The table has a multiple of so many rows."""

    seed: int

    end: int
    """The token that ends a text."""

    place: int
    """The layer's number among those with a table."""

    conv_size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv_size", (self.taps - 1) * self.size + 1)

    @property
    def heads(self) -> int:
        """Rows of a token."""
        return (self.size - 1) * self.heads_per_size

    @property
    def head_rows(self) -> tuple[int, ...]:
        """Rows of each head's part of the table."""
        return table_sizes(self.least_rows, self.place * self.heads, self.heads)

    @property
    def table_shape(self) -> tuple[int, int]:
        """Rows of the table, and elements of each."""
        rows = -(-sum(self.head_rows) // self.multiple) * self.multiple
        return rows, self.width // self.heads

    @property
    def channels(self) -> int:
        """Of the convolution: all streams."""
        return self.streams * self.hidden

    @property
    def in_size(self) -> int:
        """Width of the convolution's input."""
        return self.channels

    @property
    def draft_size(self) -> int:
        """Inputs of the convolution, then the token."""
        return self.channels + 1

    @property
    def recurrent_shape(self) -> tuple[int, int]:
        """The last tokens."""
        return 1, self.size - 1

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`."""
        return {_CONV: MixerTensor((self.channels, 1, self.taps))}

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights:
        """See `RecurrentSpec.weights`."""
        import torch

        from .....ops.mixers.ngrams import NgramNumbers, NgramWeights, multipliers

        sizes = self.head_rows
        firsts = list(accumulate(sizes, initial=0))[:-1]
        if (factors := tensors.get(FACTORS)) is None:
            factors = torch.tensor(multipliers(self.vocab, self.size, self.place, self.seed))
        numbers = NgramNumbers(factors, torch.tensor(sizes), torch.tensor(firsts), self.end, self.channels)
        return NgramWeights(numbers, tensors[_CONV].squeeze(1).T.contiguous(), self.size)

    def share(self, size: int) -> NgramSpec:
        """All of it: see `LayerSpec.why_whole`."""
        return self

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`; `LayerSpec.why_whole` says more."""
        return None

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        rows, width = self.table_shape
        return f"a table of {rows:,} rows of {width}, {self.heads} for the last {self.size} tokens"
