"""Specification of a mixture of attention heads: experts of queries and of outputs around shared keys and values.

Tests: tests/core/layers/test_query_experts.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import dataclass

from ....ops.moe.routing import Routing


@dataclass(frozen=True, slots=True)
class QueryExperts:
    """A mixture of attention heads (arXiv 2210.05144), as JetMoE has it.

    A router chooses some experts for a token. Each has a query for every head of keys and values, and takes what these
    queries attend to:

        y = Σ weight_e · output_e(attended(query_e(x))) + bias

    So attention has as many heads as experts are chosen times heads of keys and values.
    """

    count: int
    routing: Routing

    @property
    def per_token(self) -> int:
        """Experts of a token."""
        return self.routing.per_token
