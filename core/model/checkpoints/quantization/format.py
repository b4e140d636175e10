"""Interface of formats of quantised weights: which tensors a projection is stored in, and how they become weights.

Tests: tests/core/model/checkpoints/quantization/test_registry.py,
tests/core/model/checkpoints/quantization/test_forms.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .module_list import ModuleList
from .rounded_inputs import Float8Inputs, RoundedInputs

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint
    from .group_scaled import GroupScaled


#: Rows and columns of a weight `[out, in]`, as slices with a start and an end. In a stack of experts' weights
#: `[experts, out, in]` rows are counted through all of them, and may have a step.
Part = tuple[slice, slice]


def rows_and_columns(part: Sequence[slice], shape: Sequence[int]) -> Part:
    """Slices of the first dimensions of a matrix, or of a stack with one expert's first, as a part."""
    *expert, rows, columns = (
        slice(*each.indices(size))
        for each, size in zip((*part, slice(None), slice(None))[: len(shape)], shape, strict=True)
    )
    before = expert[0].start * shape[1] if expert else 0
    return slice(before + rows.start, before + rows.stop), columns


class Narrow(NamedTuple):
    """How a projection is stored, as integers or FP8 with scales per row and group of inputs."""

    bits: int
    group: int | None
    """Inputs of a group; None: a row is one."""
    has_zeros: bool = False
    inputs: RoundedInputs | Float8Inputs | None = None
    """See `GroupScaled.inputs`."""
    is_float: bool = False
    """In FP8."""
    mxfp4: bool = False
    """See `GroupScaled.mxfp4`."""


class WeightScheme(ABC):
    """How one projection is stored."""

    title: str
    """The users' name for it, such as `AWQ, 4 bits, groups of 128`."""

    @abstractmethod
    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        """True if the checkpoint has the projection whose weight is called `name` in this form."""

    @abstractmethod
    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Collection[str]:
        """Return the names of the tensors that `name`, of `shape` `[out, in]`, consists of.

        Raises UnsupportedModel if one is missing or not as described.
        """

    @abstractmethod
    def read_into(self, target: torch.Tensor, checkpoint: Checkpoint, name: str, part: Part) -> None:
        """Dequantise `part` of `name` in float32 and cast it into `target`."""

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled | None:
        """Return `part` of `name` as narrow values with scales; None if it is not stored as such."""
        return None

    def narrow(self, name: str) -> Narrow | None:
        """How `name` is stored, as far as the configuration says it; None: otherwise than that, or in no order."""
        return None


class WeightFormat(WeightScheme, ABC):
    """How a checkpoint stores the projections of its layers, and which of them it does not quantise."""

    dimensions: tuple[int, ...] = (2,)
    """Of the weights that it quantises: 2 of a projection, 3 of a stack of experts' weights."""

    plain: ModuleList = ModuleList()
    """Modules that the configuration lists as not quantised."""

    def covers(self, checkpoint: Checkpoint, name: str) -> bool:
        """True if the projection whose weight is called `name` is quantised.

        Projections of layers are, unless they are listed. Others, such as the output projection, are if stored so.
        """
        module = name.removesuffix(".weight")
        if self.plain.has(module):
            return False
        return self.stores(checkpoint, name) or (".layers." in name and not self.plain.may_have(module))

    def left_out(self, checkpoint: Checkpoint, name: str) -> bool:
        """True if the tensor has no effect on dequantised weights, such as a scale of activations."""
        return name.endswith((".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale"))


class SchemedFormat(WeightFormat):
    """A format that stores each projection by a scheme."""

    @abstractmethod
    def scheme_of(self, name: str) -> WeightScheme | None:
        """The scheme of the projection whose weight is called `name`; None: it is plain."""

    def covers(self, checkpoint: Checkpoint, name: str) -> bool:
        return self.scheme_of(name) is not None and super().covers(checkpoint, name)

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        scheme = self.scheme_of(name)
        return scheme is not None and scheme.stores(checkpoint, name)

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Collection[str]:
        return self._of(name).check(checkpoint, name, shape)

    def read_into(self, target: torch.Tensor, checkpoint: Checkpoint, name: str, part: Part) -> None:
        self._of(name).read_into(target, checkpoint, name, part)

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled | None:
        return self._of(name).scaled(checkpoint, name, part)

    def narrow(self, name: str) -> Narrow | None:
        scheme = self.scheme_of(name)
        return None if scheme is None else scheme.narrow(name)

    def _of(self, name: str) -> WeightScheme:
        scheme = self.scheme_of(name)
        assert scheme is not None, f"{name} is not quantised"
        return scheme


class UniformFormat(SchemedFormat):
    """A format that stores every projection that it quantises by one scheme."""

    def __init__(self, scheme: WeightScheme, plain: ModuleList) -> None:
        self.title = scheme.title
        self.plain = plain
        self._scheme = scheme

    def scheme_of(self, name: str) -> WeightScheme:
        return self._scheme
