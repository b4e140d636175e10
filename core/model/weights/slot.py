"""A slot of a layer's weights: the tensors of it, how ranks share them, and how they are kept.

Ops name the slots that they read (see `program.ops`). Whatever reads, moves, quantises, counts or shares weights loops
over slots.

Tests: tests/core/model/weights/test_slots.py, tests/core/model/weights/test_weight_loader.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ....memory.pages.projections import Projection, expert_path, sections_of, share_of

#: A part of a tensor: slices of its first dimensions.
Part = tuple[slice, ...]


class Keep(Enum):
    """How a slot's tensors are kept."""

    MATRIX = auto()
    """A matrix: left as it was read, cast, narrow or packed, as the weights' plan says."""

    EXPERT = auto()
    """A matrix of an expert, likewise."""

    DENSE = auto()
    """A matrix that may be stored quantised, in the model's dtype: it is never multiplied as one."""

    WHOLE = auto()
    """A matrix that every rank has all of: as `MATRIX`, but quantised only where a checkpoint stores it so."""

    NORM = auto()
    """A norm's weight: see `NormSpec`."""

    PLAIN = auto()
    """In the model's dtype."""

    FLOAT32 = auto()

    TABLE = auto()
    """In the host's memory, as the checkpoint's files map it: see `RowTable`."""

    UNUSED = auto()
    """A checkpoint has it, and no op reads it."""


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """A tensor of a layer, and the share of it that a TP rank has."""

    path: str
    """Where the layer has it, with the end of its name; norms of layers are named as their slots."""

    shape: tuple[int, ...]

    rows: tuple[tuple[int, int], ...] = ()
    """Widths of parts of its first dimension, and for each the number of equal units that ranks share. Empty: every
    rank has all of it.
    """

    columns: int = 0
    """The number of equal units of its second dimension that ranks share, likewise."""

    made: tuple[float, ...] = ()
    """No checkpoint has it: the numbers in each part of its first dimension, or in each of its rows."""

    def of_expert(self, expert: int) -> SlotTensor:
        """That of one of the experts that it stands for."""
        return SlotTensor(expert_path(self.path, expert), self.shape, self.rows, self.columns, self.made)

    def share(self, rank: int, size: int) -> tuple[Part, ...]:
        """The share of one of `size` ranks: parts, one after the other in its first dimension."""
        if size == 1 or not (self.rows or self.columns):
            return ((),)
        rows = sections_of(self.rows, rank, size) if self.rows else (slice(None),)
        columns = (share_of(self.shape[1], self.columns, rank, size),) if self.columns else ()
        return tuple((each, *columns) for each in rows)

    def numbers(self, rank: int, size: int) -> list[float]:
        """A rank's share of the numbers that no checkpoint has."""
        widths = [width for width, _ in self.rows] or [self.shape[0]]
        parts = [[each] * width for each, width in zip(self.made, widths, strict=False)]
        every = [*self.made] if len(self.made) == self.shape[0] else [number for part in parts for number in part]
        rows = sections_of(self.rows, rank, size) if self.rows else (slice(None),)
        return [number for own in rows for number in every[own]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight of a layer: tensors one below the other."""

    name: str
    """Its key in a layer's weights; with a dot, the part that it belongs to and its name there."""

    tensors: tuple[SlotTensor, ...]
    keep: Keep

    first_rank: bool = False
    """Only the first rank has it: a bias of what ranks add up."""

    factor: float | None = None
    """Of a norm that is stored as float32: multiplies its weight. None: a norm like others."""

    count: int = 0
    """It is a list of weights for so many experts, whose tensors follow one another; 0: it is no list."""

    shared: int | None = None
    """The layer whose weight it is, that layer itself included; None: it is this layer's alone."""

    stored_in: int | None = None
    """The layer in which a checkpoint has it, if that is another one."""

    @property
    def items(self) -> Iterator[tuple[SlotTensor, ...]]:
        """The tensors of each weight of the slot."""
        length = len(self.tensors) // max(1, self.count)
        return (self.tensors[first : first + length] for first in range(0, len(self.tensors), length))


def rows_of(projection: Projection) -> tuple[tuple[int, int], ...]:
    """See `SlotTensor.rows`."""
    if projection.is_replicated or projection.is_row_parallel:
        return ()
    widths = projection.sections or (projection.outputs,)
    return tuple(zip(widths, projection.section_units or (projection.units,) * len(widths), strict=True))


def weight_tensor(projection: Projection) -> SlotTensor:
    """The matrix of a projection."""
    shape = projection.outputs, projection.inputs
    columns = projection.units if projection.is_row_parallel else 0
    return SlotTensor(f"{projection.path}.weight", shape, rows_of(projection), columns)


def bias_tensor(projection: Projection, *, is_stored: bool = True) -> SlotTensor:
    """The bias of a projection: zeros if it has none, beside others that do."""
    rows = rows_of(projection)
    made = () if is_stored else (0.0,) * max(1, len(rows))
    return SlotTensor(f"{projection.path}.bias", (projection.outputs,), rows, made=made)


def shard_shape(shape: Sequence[int], parts: Iterable[Part]) -> tuple[int, ...]:
    """Shape of parts of a tensor, one after the other in its first dimension."""
    shapes = [part_shape(shape, part) for part in parts]
    return (sum(each[0] for each in shapes), *shapes[0][1:])


def part_shape(shape: Sequence[int], part: Part) -> tuple[int, ...]:
    """Shape of a part of a tensor; further dimensions are whole."""
    lengths = [len(range(*own.indices(length))) for own, length in zip(part, shape, strict=False)]
    return (*lengths, *shape[len(part) :])


def num_elems(tensor: SlotTensor, rank: int, size: int) -> int:
    """Elements of a rank's share of a tensor."""
    return math.prod(shard_shape(tensor.shape, tensor.share(rank, size)))
