"""The native library's names of activations and of norms.

Tests: tests/core/model/program/test_native_ops.py, tests/core/model/moe/test_experts.py
"""

from __future__ import annotations

from ...ops.library.native_descriptors import NativeActivation
from .specs.feed_forward import Activation, GatedActivation, UngatedActivation
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


def native_activation(activation: GatedActivation | UngatedActivation) -> NativeActivation | None:
    """The name of an activation of a feed-forward part or of experts; None: the library does not compute it."""
    if not isinstance(activation, Activation | UngatedActivation):
        return None
    return _GATED.get(activation) if isinstance(activation, Activation) else _UNGATED.get(activation)


def native_norm(kind: NormKind) -> str:
    """The name of a kind of norm."""
    return "k" + kind.name.title().replace("_", "")
