"""A large table of rows in the host's memory, of which steps fetch a few.

Tests: tests/core/model/weights/test_row_table.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import embedding


@dataclass(frozen=True, slots=True)
class RowTable:
    """Rows `[rows, width]` in one or several tensors, one below the other, such as a checkpoint's files."""

    parts: tuple[torch.Tensor, ...]

    def rows(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows by number `[tokens, each]`, those of a token side by side, in `dtype` on the device of the numbers."""
        own = numbers.cpu().long()
        found = embedding(own, self.parts[0]) if len(self.parts) == 1 else self._of_parts(own)
        return found.flatten(1).to(numbers.device, dtype)

    def _of_parts(self, numbers: torch.Tensor) -> torch.Tensor:
        first = self.parts[0]
        found = first.new_empty(*numbers.shape, first.shape[1])
        for begin, part in zip(_begins(self.parts), self.parts, strict=False):
            is_here = (numbers >= begin) & (numbers < begin + len(part))
            if is_here.any():
                found[is_here] = part[numbers[is_here] - begin]
        return found


def _begins(parts: Sequence[torch.Tensor]) -> list[int]:
    return [*accumulate(map(len, parts), initial=0)]
