"""A residual of several streams, and layers of such a one (AltUp, Gemma 3n).

Tests: tests/core/test_streams.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from ...ops.elementwise import rms_norm
from .batch import GemmBackend
from .config import ModelConfig
from .layer import Layer, Residual, multiply, normed
from .layers import NormSpec, StreamsSpec
from .step_lora import LOW_RANK_DOWN, LOW_RANK_UP
from .weights import Pack, Weights

#: The least mean square that a stream is scaled by.
_LEAST_SQUARE = 1e-5


class StreamLayer(Layer):
    """A layer's products in one step, where the residual is several streams.

    All streams are predicted from all, by factors that are made of the active one. The layer's parts take and give the
    active one, and by what they changed of it, all are corrected:

        x += prediction(x_active) · x
        r = (a + norm(mixer(n)) + n + norm(up(down(n)))) / √2, with a = x_active and n = norm(a)
        r += norm(feed_forward(norm(r)))
        x += (1 + correction(r)) ⊗ (r - a)

    The further input then adds to all streams but the first.
    """

    __slots__ = ()

    def begin(self, x: Residual) -> tuple[torch.Tensor, None]:
        """See `Layer.begin`. The streams become those that are predicted."""
        factors = self._factors(self._active(x), x.norm, self._weights.stream_prediction)
        count = x.rows.shape[1]
        x.rows.baddbmm_(factors.view(-1, count, count), x.rows.clone())
        return self.qkv(Residual(self._active(x), x.norm)), None

    def finish(
        self,
        x: Residual,
        attended: torch.Tensor | None,
        inputs: torch.Tensor | None = None,
        beside: torch.Tensor | None = None,
    ) -> None:
        """See `Layer.finish`."""
        weights, norm, predicted = self._weights, x.norm, self._active(x)
        assert attended is not None and inputs is not None, "layers of several streams have a mixer and inputs"
        own = Residual(predicted + self._output(self.o(attended), norm, weights.attention_out_norm), norm)
        own.rows.add_(self._low_rank(predicted, norm)).mul_(2**-0.5)
        own.added = self._output(self._feed_forward(own.normed(weights.mlp_norm)), norm, weights.mlp_out_norm)
        rows = own.normed(None)
        factors = self._factors(rows, norm, weights.stream_correction) + 1.0
        x.rows.addcmul_(factors[:, :, None], (rows - predicted)[:, None])
        corrected = self._active(x)
        corrected = corrected if weights.stream_scale is None else corrected * weights.stream_scale
        x.rows[:, 1:] += self._of_inputs(corrected, inputs, norm)[:, None]

    def _active(self, x: Residual) -> torch.Tensor:
        """The active stream `[tokens, hidden]`, a copy."""
        assert self._spec.streams is not None, "the layer is of several streams"
        return x.rows[:, self._spec.streams.active].clone()

    def _factors(self, rows: torch.Tensor, norm: NormSpec, weight: torch.Tensor | None) -> torch.Tensor:
        """Products of numbers that a stream's rows `[tokens, hidden]` are routed to."""
        weights = self._weights
        assert weights.stream_router is not None, "the weights are of the spec"
        assert weights.stream_router_norm is not None and weight is not None, "the weights are of the spec"
        routed = linear(rms_norm(rows, weights.stream_router_norm, norm.eps), weights.stream_router)
        return linear(routed.float().tanh().to(rows.dtype), weight)

    def _low_rank(self, rows: torch.Tensor, norm: NormSpec) -> torch.Tensor:
        """What is added beside attention, whose input is the norm of `rows`; see `StreamsSpec.rank`."""
        weights = self._weights
        assert weights.attention_norm is not None and weights.low_rank_norm is not None, "the weights are of the spec"
        assert weights.low_rank_down is not None and weights.low_rank_up is not None, "the weights are of the spec"
        rows = normed(rows, weights.attention_norm, norm)
        found = self._added(LOW_RANK_DOWN, rows, weights.low_rank_down)
        return rows + normed(self._added(LOW_RANK_UP, found, weights.low_rank_up), weights.low_rank_norm, norm)


class Streams:
    """Residuals are `[tokens, streams, hidden]`. The first stream begins with the embeddings, each other one with a
    product of them of the same magnitude, and the final norm reads their mean, each other one multiplied likewise.
    """

    layer: type[Layer] = StreamLayer
    """Computes a layer of such a residual."""

    def __init__(self, spec: StreamsSpec, hidden: int, made: Sequence[Any], joined: Sequence[Any]) -> None:
        """made, joined: see `Weights.streams`."""
        self._spec, self._made, self._joined = spec, made, joined
        self.width = spec.count * hidden
        """Elements of a token."""

    def within(self, x: Residual, memory: torch.Tensor | None = None) -> Residual:
        """The residual of layers for x `[tokens, hidden]`, in memory for `width` elements of each token; None: of its
        own.
        """
        memory = x.rows.new_empty(len(x.rows), self.width) if memory is None else memory
        return Residual(memory.view(len(memory), self._spec.count, -1), x.norm)

    def split(self, x: Residual, streams: Residual) -> Residual:
        """Begin `within`'s residual with the embeddings in x; returns it."""
        first = x.rows
        streams.rows[:, 0] = first
        for index, weight in enumerate(self._made, 1):
            streams.rows[:, index] = _as_large(multiply(GemmBackend.LIBRARY, first, weight), first)
        return streams

    def join(self, streams: Residual, x: Residual) -> None:
        """Leave in x what all layers made of it."""
        first, *others = (each.contiguous() for each in streams.rows.unbind(1))
        products = (multiply(GemmBackend.LIBRARY, *pair) for pair in zip(others, self._joined, strict=True))
        found = torch.stack([first, *(_as_large(each, first) for each in products)])
        x.rows.copy_(found.mean(0))


def streams_of(config: ModelConfig, weights: Weights, kept: Pack | None) -> Streams | None:
    """A model's; None: its residual is one stream. kept: see `Weights.layers`."""
    if config.streams is None:
        return None
    return Streams(config.streams, config.hidden_size, *weights.streams(kept))


def _as_large(rows: torch.Tensor, as_these: torch.Tensor) -> torch.Tensor:
    """Rows `[tokens, hidden]`, each multiplied so that it has the root mean square of the other."""
    want = as_these.square().mean(-1, keepdim=True) ** 0.5
    return rows * want / rows.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
