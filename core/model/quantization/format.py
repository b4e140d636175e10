"""Interface of formats of quantised weights: which tensors a projection is stored in, and how they become weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint


class WeightFormat(ABC):
    """How a checkpoint stores the projections of its layers."""

    @abstractmethod
    def covers(self, name: str) -> bool:
        """True if the projection whose weight is called `name` is quantised."""

    @abstractmethod
    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Collection[str]:
        """Return the names of the tensors that `name`, of `shape` `[out, in]`, consists of.

        Raises UnsupportedModel if one is missing or not as described.
        """

    @abstractmethod
    def left_out(self, name: str) -> bool:
        """True if the tensor has no effect on dequantised weights, such as a scale of activations."""

    @abstractmethod
    def read_into(self, target: torch.Tensor, checkpoint: Checkpoint, name: str, part: Sequence[slice]) -> None:
        """Dequantise `part` of `name` in float32 and cast it into `target`."""
