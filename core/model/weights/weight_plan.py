"""How the matrices of a model are kept: one value for each, by which it is read, and by which its bytes are counted.

Tests: tests/core/model/weights/test_narrow_bytes.py
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ....ops.gemm.narrow_weights import FLOAT4_GROUP, is_kept, kept_bits
from ....ops.library.native_integers import BITS as PACKED_BITS
from ....ops.library.native_integers import is_packed
from ..checkpoints.quantization.format import Narrow
from ..checkpoints.quantization.group_scaled import GroupScaled
from ..checkpoints.quantization.groups import form_of, packed_bits, rounds_inputs, with_signed_values


class Way(StrEnum):
    """A way to keep a matrix."""

    LEAVE = "leave"
    """As it was read, in the model's dtype."""

    CAST = "cast"
    """On the device, in the model's dtype."""

    NARROW = "narrow"
    """Values of 4 or 8 bits with scales, as a GPU's kernels multiply them."""

    PACK = "pack"
    """In the panels of a CPU's kernels: values of 4 or 8 bits with scales, or numbers of the model's dtype."""


class Kept(NamedTuple):
    """How one matrix is kept."""

    way: Way

    bits: int = 0
    """Of its values; 0: they are of the model's dtype."""

    group: int = 0
    """Inputs of a group with one scale."""

    group_bytes: int = 0
    """Bytes of a group's scale and zero point."""

    def num_bytes(self, outputs: int, inputs: int, itemsize: int) -> int:
        """itemsize: of the model's dtype."""
        if not self.bits:
            return itemsize * outputs * inputs
        return outputs * (-(-inputs * self.bits // 8) + self.group_bytes * -(-inputs // self.group))


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How matrices are kept, those of experts apart."""

    matrices: Way = Way.LEAVE
    experts: Way = Way.LEAVE

    rounds_inputs: bool = False
    """A CPU dequantises matrices, and rounds the activations that they are multiplied with where their form says so."""

    float8_inputs: bool = False
    """A GPU rounds activations to FP8 where the form of matrices says so."""

    def of(self, stored: Narrow | None, inputs: int) -> Kept:
        """stored: how a matrix with rows of `inputs` is stored, or quantised; None: its values are not narrow."""
        return _kept(self.matrices, stored, inputs)

    def of_expert(self, stored: Narrow | None, inputs: int, *, is_shared: bool = False) -> Kept:
        """Of an expert's matrix, likewise. is_shared: of the one that every token goes to."""
        if is_shared and self.experts is Way.NARROW:
            return Kept(Way.CAST)
        return _kept(self.experts, stored, inputs)

    @property
    def reads_narrow(self) -> bool:
        """True if some matrices are read as the narrow values that they are stored in."""
        return self.rounds_inputs or self.matrices in (Way.NARROW, Way.PACK)

    def reads(self, matrix: GroupScaled) -> bool:
        """True if a matrix is read as the narrow values that it is stored in, or quantised to; else dequantised."""
        if self.rounds_inputs:
            return rounds_inputs(matrix)
        matrix = with_signed_values(matrix) if self.matrices is Way.NARROW else matrix
        return self.of_values(matrix).bits > 0

    def of_values(self, signed: GroupScaled) -> Kept:
        """How a matrix with signed values is kept. A GPU keeps as many bits as these need."""
        form, inputs = form_of(signed), signed.values.shape[1]
        if self.matrices is Way.NARROW:
            form = form._replace(bits=packed_bits(signed))
        return self.of(form, inputs)

    def reads_expert(self, matrix: GroupScaled) -> bool:
        """As `reads`, of an expert's matrix. It goes by the bits that the matrix is stored in, not by its values:
        experts of a layer must lie in memory alike.
        """
        return self.of_expert(form_of(matrix), matrix.values.shape[1]).bits > 0


def _kept(way: Way, stored: Narrow | None, inputs: int) -> Kept:
    dense = Kept(Way.CAST if way is Way.NARROW else way)
    if stored is None:
        return dense
    group = stored.group or inputs
    if way is Way.NARROW and stored.mxfp4:
        return Kept(way, 4, FLOAT4_GROUP, 1) if group == FLOAT4_GROUP and not inputs % FLOAT4_GROUP else dense
    if way is Way.NARROW and is_kept(inputs, kept_bits(stored.bits), group):
        return Kept(way, kept_bits(stored.bits), group, 4 * (1 + stored.has_zeros))
    if way is Way.PACK and not stored.is_float and is_packed(inputs, stored.bits, group):
        bits = next(bits for bits in PACKED_BITS if stored.bits <= bits)
        return Kept(way, bits, group, 4 + 2 * stored.has_zeros)
    return dense


#: Of PyTorch's operators on a CPU.
LEFT = WeightPlan()

#: Of the native decoder.
PACKED = WeightPlan(Way.PACK, Way.PACK)

#: Of a GPU without kernels for narrow values.
CAST = WeightPlan(Way.CAST, Way.CAST)

#: Of a GPU.
NARROW = WeightPlan(Way.NARROW, Way.NARROW)
