"""How a file has a matrix whose rows are not one after another.

Tests: tests/memory/files/test_adapter_forms.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..pages.projections import UnitRows

if TYPE_CHECKING:
    import torch


class Arrangement(NamedTuple):
    """How a file has a matrix whose rows are not one after another."""

    stored: tuple[int, int]
    """Shape in the file."""

    is_transposed: bool = False

    interleaved_heads: int = 0
    """Heads whose rows alternate between the first and the second half, as in llama.cpp; 0: the rows are in order."""

    experts: int = 0
    """The matrix is A or B of a parameter of all of so many experts, stored as the other one of them, transposed."""

    is_a: bool = False
    """With `experts`: the matrix is A, whose rows are to be expert after expert; B's columns are rank after rank."""

    first_row: int = 0
    """Row of the whole matrix with which this one begins."""

    units: UnitRows | None = None
    """Rows of the whole matrix that this one has; None: those from `first_row` on."""

    columns: int | None = None
    """The first columns of the whole matrix that this one has; None: all."""

    def of(self, values: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The matrix `[num_rows, …]`, from the file's flat values."""
        matrix = values.view(self.stored)
        if self.is_transposed:
            matrix = matrix.T
        if self.interleaved_heads:
            by_pair = matrix.view(self.interleaved_heads, -1, 2, matrix.shape[1])
            matrix = by_pair.transpose(1, 2).reshape(matrix.shape)
        if self.experts:
            matrix = _by_other_side(matrix, self.experts, is_a=self.is_a)
        if self.units is not None:
            matrix = matrix[self.units.rows()]
        return matrix[self.first_row : self.first_row + num_rows, : self.columns]


def _by_other_side(matrix: torch.Tensor, experts: int, *, is_a: bool) -> torch.Tensor:
    """A `[experts · rank, in]` or B `[out, rank · experts]` in the order of each, from the order of the other one."""
    if is_a:
        return matrix.unflatten(0, (-1, experts)).transpose(0, 1).flatten(0, 1)
    return matrix.unflatten(1, (experts, -1)).transpose(1, 2).flatten(1, 2)
