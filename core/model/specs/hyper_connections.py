"""Specification of hyper-connections, by which the parts of layers take of several residual streams, and give to them.

Tests: tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HyperConnectionSpec:
    """The residual is several streams s of one width, which are equal before the layers (arXiv 2409.19606).

    For each part f of a layer, numbers m are made of all streams together:

        m = fn · s · (mean(s²) + eps)^-½
        take = sigmoid(scale_0 · m_0 + base_0) + floor
        give = magnitude · sigmoid(scale_1 · m_1 + base_1) + given_floor
        mix = balanced(softmax(scale_2 · m_2 + base_2) + floor)
        s = mixᵀ · s + give ⊗ f(norm(Σ take · s))

    The part takes one number of each stream and gives one to each. `balanced` divides rows and columns in turn by their
    sums, so that both are near 1 (Sinkhorn-Knopp; arXiv 2512.24880, "manifold-constrained"). Without rounds of it,
    there is no mix: the streams stay. Numbers are float32 whatever the model's dtype.
    """

    count: int

    eps: float
    floor: float

    magnitude: float = 2.0
    given_floor: float = 0.0

    rounds: int = 0
    """Rounds of Sinkhorn-Knopp; 0: streams are not mixed (HY V4)."""

    joined: bool = True
    """The streams are joined by numbers that are made as `take`; else their mean goes on (GLM-5.3-Flash)."""

    @property
    def rows(self) -> int:
        """Numbers of a part."""
        return (2 + self.count) * self.count if self.rounds else 2 * self.count

    @property
    def scales(self) -> int:
        """Learned factors of a part's numbers."""
        return 3 if self.rounds else 2

    def num_weights(self, hidden: int, layers: int) -> int:
        """Weights of its matrices, of two parts of each layer and of the end."""
        return self.count * hidden * (2 * layers * self.rows + self.joined * self.count)
