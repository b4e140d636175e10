"""Interface of forms of integers with scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .format import Part, WeightScheme
from .group_scaled import GroupScaled

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint


class IntegerScheme(WeightScheme, ABC):
    """A form of integers with scales."""

    @abstractmethod
    def integers(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled: ...

    def read_into(self, target: torch.Tensor, checkpoint: Checkpoint, name: str, part: Part) -> None:
        self.integers(checkpoint, name, part).dequantise_into(target)
