"""Specification of several residual streams of which the parts of layers take by gates.

Tests: tests/core/layers/test_gated_streams.py
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedStreamsSpec:
    """The residual is several streams s of one width, which are equal before the layers (Qwen4-Exp).

    For each part f of a layer, where n is the norm of each stream by itself, with weights of all streams:

        gates = sigmoid(up(silu(down(n) / count)))      of each element of n
        give = 2 · sigmoid(inject(n) / count)           a number for each stream
        s += give ⊗ f(mean(gates · n))

    Such a mean is also what is left behind all layers, in place of a norm.
    """

    count: int

    rank: int
    """Width between down and up."""

    def num_weights(self, hidden: int, layers: int) -> int:
        """Weights of the model's own matrices: none, as all are projections of layers."""
        del hidden, layers
        return 0
