"""A residual of several streams (AltUp, Gemma 3n).

Tests: tests/core/test_streams.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .batch import BY_LIBRARY, GemmBackends
from .program.torch_ops import backend_for, multiply
from .specs.config import ModelConfig
from .specs.layers import StreamsSpec
from .weights.weights import Pack, Weights

#: The least mean square that a stream is scaled by.
_LEAST_SQUARE = 1e-5


class Streams:
    """Residuals are `[tokens, streams, hidden]`. The first stream begins with the embeddings, each other one with a
    product of them of the same magnitude, and the final norm reads their mean, each other one multiplied likewise.
    """

    def __init__(self, spec: StreamsSpec, hidden: int, made: Sequence[Any], joined: Sequence[Any]) -> None:
        """made, joined: see `Weights.streams`."""
        self._spec, self._made, self._joined = spec, made, joined
        self.width = spec.count * hidden
        """Elements of a token."""

    def within(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Memory for the streams of x `[tokens, hidden]`, in one with `width` elements of each token; None: of their
        own.
        """
        memory = x.new_empty(len(x), self.width) if memory is None else memory
        return memory.view(len(memory), self._spec.count, -1)

    @property
    def weights(self) -> Sequence[Any]:
        """The matrices of `split` and `join`."""
        return [*self._made, *self._joined]

    def split(self, x: torch.Tensor, streams: torch.Tensor, backends: GemmBackends = BY_LIBRARY) -> torch.Tensor:
        """Begin `within`'s streams with the embeddings x; returns them."""
        streams[:, 0] = x
        for index, weight in enumerate(self._made, 1):
            streams[:, index] = _as_large(multiply(backend_for(backends, weight), x, weight), x)
        return streams

    def join(self, streams: torch.Tensor, x: torch.Tensor, backends: GemmBackends = BY_LIBRARY) -> None:
        """Leave in x what all layers made of it."""
        first, *others = (each.contiguous() for each in streams.unbind(1))
        pairs = zip(others, self._joined, strict=True)
        products = (multiply(backend_for(backends, weight), each, weight) for each, weight in pairs)
        found = torch.stack([first, *(_as_large(each, first) for each in products)])
        x.copy_(found.mean(0))


def streams_of(config: ModelConfig, weights: Weights, kept: Pack | None) -> Streams | None:
    """A model's; None: its residual is one stream. kept: see `Weights.layers`."""
    if config.streams is None:
        return None
    return Streams(config.streams, config.hidden_size, *weights.streams(kept))


def _as_large(rows: torch.Tensor, as_these: torch.Tensor) -> torch.Tensor:
    """Rows `[tokens, hidden]`, each multiplied so that it has the root mean square of the other."""
    want = as_these.square().mean(-1, keepdim=True) ** 0.5
    return rows * want / rows.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
