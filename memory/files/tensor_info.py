"""Where an adapter's file has a tensor, or how it is computed from others.

Tests: tests/memory/files/test_adapter_files.py, tests/memory/files/methods/test_methods.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..pages.projections import UnitRows
from .arrangement import Arrangement
from .formulas import Formula


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file: its element type, shape, and position from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    arrangement: Arrangement | None = None
    """None: the file has the matrix as it is."""
    computed: Computed | None = None
    """How it is computed from other tensors, in float32; None: the file has it. Position and size are then 0."""

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors of the file that it is read from."""
        return (self,) if self.computed is None else self.computed.parts

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a matrix of this shape can be read from it."""
        if self.computed is None or not self.computed.is_wide or len(shape) != 2:
            return self.shape == shape
        return self.shape[0] >= shape[0] and self.shape[1] >= shape[1]

    def rows(self, first: int, count: int) -> TensorInfo:
        """A run of the rows of a matrix."""
        shape = (count, *self.shape[1:])
        if self.arrangement is not None or self.computed is not None:
            arrangement = self.arrangement or Arrangement((self.shape[0], self.shape[1]))
            return replace(self, shape=shape, arrangement=arrangement._replace(first_row=first))
        row_bytes = self.num_bytes // self.shape[0]
        return replace(self, shape=shape, offset=self.offset + first * row_bytes, num_bytes=count * row_bytes)

    def first_columns(self, count: int) -> TensorInfo:
        """The first columns of a matrix."""
        arrangement = self.arrangement or Arrangement((self.shape[0], self.shape[1]))
        return replace(self, shape=(self.shape[0], count), arrangement=arrangement._replace(columns=count))

    def by_unit(self, units: UnitRows) -> TensorInfo:
        """Rows of a matrix, or values of a vector, by unit."""
        as_it_is = Arrangement((self.shape[0], self.shape[1] if len(self.shape) > 1 else 1))
        arrangement = (self.arrangement or as_it_is)._replace(units=units)
        return replace(self, shape=(units.total, *self.shape[1:]), arrangement=arrangement)

    def matrix(self, index: int) -> TensorInfo:
        """One of the matrices of a tensor with three dimensions."""
        num_bytes = self.num_bytes // self.shape[0]
        return TensorInfo(self.dtype, self.shape[1:], self.offset + index * num_bytes, num_bytes, self.arrangement)


class Computed(NamedTuple):
    """How A or B is computed."""

    method: str
    """The method of training, for messages."""
    formula: Formula
    parts: tuple[TensorInfo, ...]
    """The file's tensors, in the formula's order."""
    rank: int | None = None
    """What the configuration calls the rank, as the tensors tell it; None: they don't."""
    is_larger: bool = True
    """True if A and B may take far more memory than the file's tensors."""
    is_wide: bool = False
    """True if modules with fewer inputs or outputs have the first columns or rows of it."""
