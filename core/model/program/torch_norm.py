"""Norms by their kinds.

Tests: tests/core/paths
"""

from __future__ import annotations

import torch

from ....ops.elementwise.elementwise import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ..specs.norms import NormKind, NormSpec


def normed(x: torch.Tensor, weight: torch.Tensor, norm: NormSpec, added: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of x `[tokens, hidden]`, to which `added` is added in place first."""
    match norm.kind:
        case NormKind.RMS:
            return rms_norm(x, weight, norm.eps) if added is None else add_rms_norm(added, x, weight, norm.eps)
        case NormKind.LAYER:
            return layer_norm(x, weight, norm.eps) if added is None else add_layer_norm(added, x, weight, norm.eps)
        case NormKind.BIASED_LAYER:
            return layer_norm(x if added is None else x.add_(added), weight[0], norm.eps, weight[1])
