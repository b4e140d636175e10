"""The native library's names of activations.

Tests: tests/core/model/program/test_native_ops.py, tests/core/model/moe/test_experts.py
"""

from __future__ import annotations

from ...ops.library.native_descriptors import NativeGating
from .specs.feed_forward import (
    Activation,
    BoundedSwiglu,
    ClampedSwiglu,
    GatedActivation,
    LimitedSwiglu,
    UngatedActivation,
)

_GATED = {
    Activation.SILU: "kSilu",
    Activation.GELU_TANH: "kGelu",
    Activation.RELU_SQUARED: "kReluSquaredGate",
    Activation.GELU: "kGeluByErfGate",
}

#: Of parts without a gate. Their names are those of others.
_UNGATED = {
    UngatedActivation.GELU_TANH: "kGeluAlone",
    UngatedActivation.GELU: "kGeluByErf",
    UngatedActivation.RELU: "kRelu",
    UngatedActivation.RELU_SQUARED: "kReluSquared",
    UngatedActivation.XIELU: "kXielu",
}


def native_gating(activation: GatedActivation | UngatedActivation) -> NativeGating | None:
    """The name and numbers of an activation of a feed-forward part or of experts; None: the library lacks it."""
    match activation:
        case ClampedSwiglu(alpha, limit):
            return NativeGating("kClampedSwiglu", alpha, limit)
        case LimitedSwiglu(limit):
            return NativeGating("kLimitedSwiglu", limit=limit)
        case BoundedSwiglu(limit):
            return NativeGating("kBoundedSwiglu", limit=limit)
    found = _GATED.get(activation) if isinstance(activation, Activation) else _UNGATED.get(activation)
    return None if found is None else NativeGating(found)
