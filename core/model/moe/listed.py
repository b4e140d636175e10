"""Weights of which a token takes some, as a checkpoint has them: expert after expert.

Tests: tests/core/model/moe/test_experts.py, tests/core/layers/test_query_experts.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class ListedWeights(ABC):
    """A part of a layer's weights, just read. It is then kept as the kernels of its device need it."""

    __slots__ = ()

    @abstractmethod
    def packed(self, dtype: torch.dtype) -> Any:
        """For kernels on a CPU. Its matrices are packed already."""

    @abstractmethod
    def stacked(self, dtype: torch.dtype, device: torch.device) -> Any:
        """In stacks on a GPU: one launch multiplies all of them."""
