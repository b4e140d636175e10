"""The matrices of a mixture of attention heads: those that make queries, and those that take what these attend to.

Tests: tests/core/layers/test_query_experts.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .....ops.moe.expert_gemms import Matrix, multiply_each
from .....ops.moe.expert_tiles import Stack
from .....ops.moe.routing import Routing
from .....ops.moe.routing_schedule import choice_constants
from ...moe.experts import ExpertChoice, choose, sorted_by_expert, unpacked, weighted_sum
from ...moe.listed import ListedWeights
from ...moe.stacked_experts import stacked


class QueryMatrices(ABC):
    """A layer's experts of queries and of outputs: see `QueryExperts`. A row's bits depend on no other row, as far as
    `multiply_each` promises that.
    """

    @abstractmethod
    def choose(self, logits: torch.Tensor, routing: Routing) -> ExpertChoice:
        """Choose experts by a router's logits `[rows, experts]` float32, contiguous."""

    @abstractmethod
    def queries_of(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The queries of each row of x `[rows, hidden]` by its experts, `[rows · per_token, queries]`.

        chosen: `[rows, per_token]` int64.
        """

    @abstractmethod
    def outputs_of(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the outputs of each row's experts, `[rows, hidden]`.

        x: `[rows · per_token, queries]`. weights: `[rows, per_token]` float32.
        """


@dataclass(slots=True)
class ListedQueries(QueryMatrices, ListedWeights):
    """Expert after expert, for a CPU."""

    queries: list[Matrix]
    """Each expert's query projection, `[queries, hidden]`."""

    outputs: list[Matrix]
    """Each expert's output projection, `[hidden, queries]`."""

    def packed(self, dtype: torch.dtype) -> ListedQueries:
        """See `ListedWeights`."""
        del dtype
        return self

    def stacked(self, dtype: torch.dtype, device: torch.device) -> StackedQueries:
        """See `ListedWeights`."""
        queries, outputs = unpacked(self.queries), unpacked(self.outputs)
        return StackedQueries(stacked(queries, None, dtype, device), stacked(outputs, None, dtype, device))

    def choose(self, logits: torch.Tensor, routing: Routing) -> ExpertChoice:
        return choose(logits, routing)

    def queries_of(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return _multiply(x, chosen, self.queries, chosen.shape[1])

    def outputs_of(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = _multiply(x, chosen, self.outputs, 1)
        return weighted_sum(y.view(*chosen.shape, -1), weights).to(x.dtype)


def _multiply(x: torch.Tensor, chosen: torch.Tensor, matrices: Sequence[Matrix], per_row: int) -> torch.Tensor:
    """Products of rows with the matrices that they go to, by pair of a row and an expert. per_row: pairs of a row."""
    own = sorted_by_expert(chosen)
    y = multiply_each(x.index_select(0, own.pairs // per_row), own.ends, [matrices[each] for each in own.used])
    return torch.empty_like(y).index_copy_(0, own.pairs, y)


@dataclass(slots=True)
class StackedQueries(QueryMatrices):
    """In two tensors, for kernels that multiply all experts in one launch, on a GPU."""

    queries: Stack
    outputs: Stack

    # These modules need triton.

    def choose(self, logits: torch.Tensor, routing: Routing) -> ExpertChoice:
        from .....ops.moe import routing_triton

        return ExpertChoice(*routing_triton.choose(logits, None, choice_constants(routing, logits.shape[1])))

    def queries_of(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return _multiply_stack(x, chosen, self.queries, chosen.shape[1])

    def outputs_of(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        from .....ops.moe import routing_triton

        y = _multiply_stack(x, chosen, self.outputs, 1)
        return routing_triton.add_up(y.view(*chosen.shape, -1), weights)


def _multiply_stack(x: torch.Tensor, chosen: torch.Tensor, stack: Stack, per_row: int) -> torch.Tensor:
    """As `_multiply`."""
    from .....ops.moe import expert_tiles_triton
    from .....ops.moe.routing_triton import tiles_of

    return expert_tiles_triton.multiply(x, stack, tiles_of(chosen, len(stack.data), stack), per_row)
