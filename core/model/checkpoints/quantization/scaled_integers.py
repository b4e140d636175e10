"""The integers of compressed-tensors: signed, packed or not, with a scale and perhaps a zero point per group.

Tests: tests/core/model/checkpoints/quantization/test_forms.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...config_json import UnsupportedModel
from .format import Narrow, Part
from .group_scaled import SIGNED_BITS, GroupScaled, groups_of, signed
from .packing import WORD_BITS, num_words, unpack, words_of
from .read_fields import num_groups
from .reading import check_range, read_scales
from .rounded_inputs import RoundedInputs
from .scaled_scheme import ScaledScheme

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint

Strategy = Literal["tensor", "channel", "group"]


@dataclass(frozen=True)
class ScaledIntegers(ScaledScheme):
    """`weight = (q - zero) · scale` of tensors `weight` (int8) or `weight_packed`, `weight_scale`,
    `weight_zero_point` and `weight_g_idx`.
    """

    title: str
    bits: int
    strategy: Strategy
    """Whether a scale is of the tensor, of an output channel, or of a group of inputs."""

    group: int | None = None
    """Inputs per group."""

    is_packed: bool = True
    """Words of 32 bits hold `q + 2^(bits-1)`."""

    has_zeros: bool = False
    has_act_order: bool = False
    inputs: RoundedInputs | None = None
    """How activations are rounded; None: they are not."""

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        return (
            f"{name}_packed" in checkpoint if self.is_packed else name in checkpoint and not checkpoint[name].is_plain
        )

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> list[str]:
        outputs, inputs = shape
        scale, zero, order, told = (f"{name}_{each}" for each in ("scale", "zero_point", "g_idx", "shape"))
        found = [f"{name}_packed" if self.is_packed else name, scale]
        if self.is_packed:
            checkpoint.check({found[0]: (outputs, num_words(inputs, self.bits))}, ("I32",))
            if told in checkpoint:
                self._check_shape(checkpoint, told, shape)
                found.append(told)
        else:
            checkpoint.check({name: shape}, ("I8",))
        scales = self._scale_shape(checkpoint, scale, outputs, inputs)
        checkpoint.check({scale: scales})
        if self.has_zeros or zero in checkpoint:
            self._check_zeros(checkpoint, zero, scales)
            found.append(zero)
        if self.has_act_order or order in checkpoint:
            checkpoint.check({order: (inputs,)}, ("I32",))
            found.append(order)
        return found

    def narrow(self, name: str) -> Narrow | None:
        return None if self.has_act_order else Narrow(self.bits, self.group, self.has_zeros, self.inputs)

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled:
        rows, columns = part
        groups, group_of = self._groups(checkpoint, f"{name}_g_idx", columns)
        scales = self._of_groups(read_scales(checkpoint, f"{name}_scale"), rows, groups)
        zeros = self._zeros(checkpoint, f"{name}_zero_point", rows, groups)
        values = self._values(checkpoint, name, rows, columns)
        return GroupScaled(values, self.bits, scales, zeros, group_of, inputs=self.inputs)

    def _of_groups(self, values: torch.Tensor, rows: slice, groups: slice) -> torch.Tensor:
        """Values of `rows` and `groups` `[rows, groups]`, of a tensor that has them for all."""
        if self.strategy == "tensor":
            return values.reshape(1, 1).expand(rows.stop - rows.start, 1)
        return values.reshape(len(values), -1)[rows, groups]

    def _scale_shape(self, checkpoint: Checkpoint, name: str, outputs: int, inputs: int) -> tuple[int, ...]:
        """The shape that the scales must have; of several that mean the same, the one that they have."""
        allowed: list[tuple[int, ...]] = [(outputs, num_groups(inputs, self.group))]
        if self.strategy == "channel":
            allowed.append((outputs,))
        if self.strategy == "tensor":
            allowed = [(1,), (), (1, 1)]
        found = checkpoint[name].shape if name in checkpoint else ()
        return found if found in allowed else allowed[0]

    def _check_zeros(self, checkpoint: Checkpoint, name: str, scales: tuple[int, ...]) -> None:
        if name in checkpoint and checkpoint[name].dtype == "I32":
            rows, *others = scales
            checkpoint.check({name: (num_words(rows, self.bits), *(others or (1,)))}, ("I32",))
        else:
            checkpoint.check({name: scales}, ("I8", "I32"))

    def _check_shape(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
        checkpoint.check({name: (2,)}, ("I64", "I32"))
        told = checkpoint.read(name).tolist()
        if told != list(shape):
            raise UnsupportedModel(
                f"{checkpoint[name].path}: tensor {name} says {told}, config.json needs {list(shape)}"
            )

    def _values(self, checkpoint: Checkpoint, name: str, rows: slice, columns: slice) -> torch.Tensor:
        if not self.is_packed:
            return checkpoint.read(name, (rows, columns))
        words, within = words_of(columns, WORD_BITS // self.bits)
        stored = unpack(checkpoint.read(f"{name}_packed", (rows, words)), self.bits, 1)[:, within]
        values = signed(stored, self.bits)
        return values if self.bits == SIGNED_BITS else values - (1 << (self.bits - 1))

    def _zeros(self, checkpoint: Checkpoint, name: str, rows: slice, groups: slice) -> torch.Tensor | None:
        import torch

        if name not in checkpoint:
            return None
        half = 1 << (self.bits - 1)
        if checkpoint[name].dtype == "I32":
            words, within = words_of(rows, WORD_BITS // self.bits)
            return unpack(checkpoint.read(name, (words, groups)), self.bits, 0)[within].to(torch.int16) - half
        zeros = checkpoint.read(name)
        check_range(checkpoint, name, zeros, -half, half - 1)
        return self._of_groups(zeros, rows, groups).to(torch.int16)

    def _groups(self, checkpoint: Checkpoint, name: str, columns: slice) -> tuple[slice, torch.Tensor]:
        """The groups that columns are in, and each one's place among them."""
        if name in checkpoint:
            group_of = checkpoint.read(name).long()
            if self.has_act_order or bool((group_of >= 0).any()):  # without act order, all may be -1
                groups = slice(0, num_groups(len(group_of), self.group))
                check_range(checkpoint, name, group_of, 0, groups.stop - 1)
                return groups, group_of[columns]
        return groups_of(columns, self.group)
