"""Bytes of a model's weights as a GPU keeps them, by its configuration alone: planners read no checkpoint.

Tests: tests/core/model/test_narrow_bytes.py
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...ops.narrow_weights import BITS, is_kept
from .config import ModelConfig
from .quantization.format import Narrow
from .quantization.round_to_nearest import RoundToNearest
from .tensor_parts import EMBED, IN_LAYER, LM_HEAD, sources, tensor_shapes


class WeightBytes(NamedTuple):
    """Bytes of parts of a model."""

    projections: int
    """Of layers, as they are kept."""
    dense: int
    """Of the same where they are narrow, in the model's dtype: a step of many rows widens them."""
    head: int
    """Of the output projection."""
    others: int
    """Of all else: embeddings, norms and biases. Tied embeddings count as the head, unless the head is quantised."""

    @property
    def total(self) -> int:
        return self.projections + self.head + self.others


def weight_bytes(config: ModelConfig, itemsize: int, quantiser: RoundToNearest | None = None) -> WeightBytes:
    """Bytes of a model without experts, of weights of `itemsize` bytes where they are not kept narrow.

    quantiser: quantises the projections while they are read; else they are as the checkpoint's configuration says.
    """
    names, shapes = sources(config, ()), tensor_shapes(config)
    projections = dense = others = 0
    for part, shape in shapes.items():
        num_bytes = itemsize * math.prod(shape)
        if part == LM_HEAD or (part == EMBED and LM_HEAD not in shapes):
            continue
        if len(shape) != 2 or not IN_LAYER.match(part):
            others += num_bytes
            continue
        kept = _kept_bytes(shape, _narrow(config, names[part].name, shape[1], quantiser))
        projections += num_bytes if kept is None else kept
        dense += 0 if kept is None else num_bytes
    shape = config.vocab_size, config.hidden_size
    head = itemsize * math.prod(shape)
    if quantiser is not None and quantiser.lm_head:
        others += 0 if LM_HEAD in shapes else head  # the embeddings stay beside it
        head = _kept_bytes(shape, _of(quantiser, shape[1])) or head
    return WeightBytes(projections, dense, head, others)


def _narrow(config: ModelConfig, name: str, inputs: int, quantiser: RoundToNearest | None) -> Narrow | None:
    """How a projection is kept if a GPU can; None: dequantised, or plain."""
    if quantiser is not None:
        return _of(quantiser, inputs)
    how = config.weight_format
    if how is None or how.plain.has(name.removesuffix(".weight")):
        return None
    return how.narrow(name)


def _of(quantiser: RoundToNearest, inputs: int) -> Narrow:
    return Narrow(quantiser.bits, quantiser.group_of(inputs))


def _kept_bytes(shape: tuple[int, ...], narrow: Narrow | None) -> int | None:
    """Bytes of a narrow weight `[out, in]` with its float32 scales and zero points; None if it can't be kept so."""
    if narrow is None or narrow.bits > max(BITS):
        return None
    outputs, inputs = shape
    bits, group = next(bits for bits in BITS if narrow.bits <= bits), narrow.group or inputs
    if not is_kept(inputs, bits, group):
        return None
    return outputs * (inputs * bits // 8 + 4 * -(-inputs // group) * (1 + narrow.has_zeros))
