"""Formulas that compute A or B from matrices of an adapter's file when they are read.

Tests: tests/memory/files/methods/test_methods.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Formula(Protocol):
    """A formula; its text is part of content hashes."""

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        """The matrix, in float32 as the parts are."""
        ...

    def is_zero(self, *parts: bool) -> bool:
        """True if the matrix is all zeros, by which parts are."""
        ...


class RowProducts(NamedTuple):
    """Each row of one matrix times each of another, element by element (Khatri-Rao)."""

    by_columns: bool = False
    """Products of columns instead."""

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        one, two = (part.T for part in parts) if self.by_columns else parts
        found = (one[:, None] * two).flatten(0, 1)
        return found.T if self.by_columns else found

    def is_zero(self, *parts: bool) -> bool:
        return any(parts)


class Kronecker(NamedTuple):
    """Kronecker product of two matrices, each a part, or an identity of so many rows; 0: it is a part."""

    first: int = 0
    second: int = 0

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        import torch

        left = iter(parts)
        one, two = (torch.eye(size) if size else next(left) for size in self)
        return torch.kron(one.contiguous(), two.contiguous())

    def is_zero(self, *parts: bool) -> bool:
        return any(parts)


class Stacked(NamedTuple):
    """Matrices one above another."""

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat(parts)

    def is_zero(self, *parts: bool) -> bool:
        return all(parts)


class Blocks(NamedTuple):
    """Matrices side by side, each in rows of its own; zeros elsewhere."""

    firsts: tuple[int, ...]
    """The first row of each."""
    rows: int
    factors: tuple[float, ...] = ()
    """Of each; empty: 1."""

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        import torch

        found, column = torch.zeros(self.rows, sum(part.shape[1] for part in parts)), 0
        for first, factor, part in zip(self.firsts, self.factors or (1.0,) * len(parts), parts, strict=True):
            found[first : first + part.shape[0], column : column + part.shape[1]] = factor * part
            column += part.shape[1]
        return found

    def is_zero(self, *parts: bool) -> bool:
        return all(parts)


class Tiled(NamedTuple):
    """Rows of a matrix that are `[each, groups, size]` in the file, put in the order `[groups, each, size]`."""

    groups: int
    each: int
    size: int
    first: int = 0
    """The first of these rows; those before it stay where they are."""
    by_columns: bool = False
    """Columns instead."""

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        import torch

        (matrix,) = parts
        matrix = matrix.T if self.by_columns else matrix
        tiled = matrix[self.first :].unflatten(0, (self.each, self.groups, self.size))
        found = torch.cat([matrix[: self.first], tiled.transpose(0, 1).flatten(0, 2)])
        return found.T if self.by_columns else found

    def is_zero(self, *parts: bool) -> bool:
        return all(parts)


class ScaledRows(NamedTuple):
    """The first rows of a matrix, each times a value of a vector, of which there may be fewer."""

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        matrix, vector = parts
        return matrix[: vector.numel()] * vector.reshape(-1, 1)

    def is_zero(self, *parts: bool) -> bool:
        return any(parts)


class Identities(NamedTuple):
    """Identity matrices side by side, the last of which may be cut."""

    rows: int
    columns: int

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.eye(self.rows).repeat(1, -(-self.columns // self.rows))[:, : self.columns]

    def is_zero(self, *parts: bool) -> bool:
        return False


class Zeros(NamedTuple):
    """A matrix of zeros."""

    rows: int
    columns: int

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.zeros(self.rows, self.columns)

    def is_zero(self, *parts: bool) -> bool:
        return True


class Mixture(NamedTuple):
    """Vectors of a bank, the first part, mixed by the softmax of their largest logits, the second."""

    topk: int
    by_columns: bool = False
    """The vectors go down columns, not along rows."""

    def of(self, *parts: torch.Tensor) -> torch.Tensor:
        bank, logits = parts
        largest = logits.topk(self.topk, dim=-1)
        mixed = (largest.values.softmax(-1)[..., None] * bank[largest.indices]).sum(-2)
        return mixed.transpose(1, 2).flatten(0, 1) if self.by_columns else mixed.flatten(1)

    def is_zero(self, *parts: bool) -> bool:
        return parts[0]
