"""Share of a mixture's experts that a step's tokens go to.

Tests: tests/core/costs/test_costs.py
"""

from __future__ import annotations


def share_of_experts(each: float, tokens: int) -> float:
    """Share of the experts that so many tokens go to on average, each to a share of its own of them."""
    return 1.0 - (1.0 - each) ** tokens
