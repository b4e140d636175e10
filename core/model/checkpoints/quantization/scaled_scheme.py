"""Interface of forms of integers with scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .format import Part, WeightScheme
from .group_scaled import GroupScaled

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint


class ScaledScheme(WeightScheme, ABC):
    """A form of narrow values with scales."""

    @abstractmethod
    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled: ...

    def read_into(self, target: torch.Tensor, checkpoint: Checkpoint, name: str, part: Part) -> None:
        self.scaled(checkpoint, name, part).dequantise_into(target)
