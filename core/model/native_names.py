"""The native library's names of activations and of norms.

Tests: tests/core/model/program/test_native_ops.py, tests/core/model/moe/test_experts.py
"""

from __future__ import annotations

from ...ops.library.native_descriptors import NativeActivation, NativeGating
from .specs.feed_forward import (
    Activation,
    BoundedSwiglu,
    ClampedSwiglu,
    GatedActivation,
    LimitedSwiglu,
    UngatedActivation,
)
from .specs.norms import NormKind

_GATED = {
    Activation.SILU: NativeActivation.SILU,
    Activation.GELU_TANH: NativeActivation.GELU,
    Activation.RELU_SQUARED: NativeActivation.RELU_SQUARED_GATE,
    Activation.GELU: NativeActivation.GELU_BY_ERF_GATE,
}

#: Of parts without a gate. Their names are those of others.
_UNGATED = {
    UngatedActivation.GELU_TANH: NativeActivation.GELU_ALONE,
    UngatedActivation.GELU: NativeActivation.GELU_BY_ERF,
    UngatedActivation.RELU: NativeActivation.RELU,
    UngatedActivation.RELU_SQUARED: NativeActivation.RELU_SQUARED,
    UngatedActivation.XIELU: NativeActivation.XIELU,
}


def native_gating(activation: GatedActivation | UngatedActivation) -> NativeGating | None:
    """The name and numbers of an activation of a feed-forward part or of experts; None: the library lacks it."""
    match activation:
        case ClampedSwiglu(alpha, limit):
            return NativeGating(NativeActivation.CLAMPED_SWIGLU, alpha, limit)
        case LimitedSwiglu(limit):
            return NativeGating(NativeActivation.LIMITED_SWIGLU, limit=limit)
        case BoundedSwiglu(limit):
            return NativeGating(NativeActivation.BOUNDED_SWIGLU, limit=limit)
    found = _GATED.get(activation) if isinstance(activation, Activation) else _UNGATED.get(activation)
    return None if found is None else NativeGating(found)


def native_norm(kind: NormKind) -> str:
    """The name of a kind of norm."""
    return "k" + kind.name.title().replace("_", "")
