"""Weights of a decoder layer, and of those of its parts whose weights are one object.

Tests: tests/core/model/weights/test_weight_loader.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

#: One decoder layer's weights by slot; see `slots`. Each is a tensor, a matrix as it is kept (packed, narrow), or the
#: weights of a recurrent mixer or of a mixture of experts. A slot that the layer does not have is absent.
LayerWeights = dict[str, Any]


class PartWeights(NamedTuple):
    """What a part's object is made of."""

    own: Mapping[str, Any]
    """The weights of its slots, by the ends of their names."""

    parts: Mapping[str, Any]
    """Objects of the parts that were declared before it."""

    ranks: int
    """TP ranks that share the layer."""

    beside: Callable[[str, str, str], torch.Tensor | None]
    """Reads a tensor that no slot has: the path of a slot's, a module around it, and the name beside that module."""


#: Makes the object of a part.
MakesPart = Callable[[PartWeights], Any]
