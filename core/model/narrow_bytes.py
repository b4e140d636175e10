"""Bytes of a model's weights as they are kept, by its configuration alone: planners read no checkpoint.

Tests: tests/core/model/test_narrow_bytes.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...ops.narrow_weights import FLOAT4_GROUP, is_kept, kept_bits
from ...ops.native_integers import BITS as PACKED_BITS
from ...ops.native_integers import MULTIPLE
from .config import ModelConfig
from .narrow_experts import is_kept_float4
from .quantization.format import Narrow
from .quantization.round_to_nearest import RoundToNearest
from .shard import WHOLE, Shard
from .slots import Keep, Slot, SlotTensor
from .tensor_names import PACKED
from .tensor_parts import EMBED, LM_HEAD, Source, slots_of, sources, tensor_shapes


class WeightBytes(NamedTuple):
    """Bytes of parts of a model."""

    projections: int
    """Of layers without their experts, as they are kept."""
    dense: int
    """Of the same where they are narrow, in the model's dtype: a step of many rows widens them."""
    head: int
    """Of the output projection."""
    experts: int
    """Of all experts of mixtures, as a GPU keeps them."""
    others: int
    """Of all else: embeddings, norms and biases. Tied embeddings count as the head, unless the head is quantised."""

    @property
    def total(self) -> int:
        return self.projections + self.head + self.experts + self.others


def weight_bytes(config: ModelConfig, itemsize: int, quantiser: RoundToNearest | None = None) -> WeightBytes:
    """Bytes of a model of weights of `itemsize` bytes where they are not kept narrow.

    quantiser: quantises the projections while they are read; else they are as the checkpoint's configuration says.
    """
    parts, shapes = dict(_matrices(config)), tensor_shapes(config)
    head_name = LM_HEAD if LM_HEAD in shapes else EMBED
    others = itemsize * sum(math.prod(shapes[part]) for part in shapes.keys() - parts.keys() - {head_name})
    experts = itemsize * sum(math.prod(shapes[part]) for part, slot in parts.items() if slot.count)
    head = itemsize * math.prod(shapes[head_name])
    if quantiser is not None and quantiser.lm_head:
        others += 0 if head_name == LM_HEAD else head  # the embeddings are kept as well
        vocab, hidden = shapes[head_name]
        head = _kept_bytes((vocab, hidden), _of(quantiser, hidden)) or head
    names, projections, dense = sources(config, ()), 0, 0
    for part, slot in parts.items():
        outputs, inputs = shapes[part]
        num_bytes, kept = itemsize * outputs * inputs, None
        if slot.keep is Keep.MATRIX:
            kept = _kept_bytes((outputs, inputs), _narrow(config, names[part].name, inputs, quantiser))
        projections += num_bytes if kept is None else kept
        dense += 0 if kept is None else num_bytes
    kept_experts = experts - bytes_saved_by_stacks(config, itemsize, quantiser=quantiser)
    return WeightBytes(projections - experts, dense, head, kept_experts, others)


def _matrices(config: ModelConfig) -> Iterator[tuple[str, Slot]]:
    """All matrices of layers, and the slots that they are in."""
    every = ((at + part.path, slot, part) for at, slot in slots_of(config) for part in slot.tensors)
    return ((name, slot) for name, slot, part in every if len(part.shape) == 2)


def bytes_saved_by_stacks(
    config: ModelConfig, itemsize: int, shard: Shard = WHOLE, quantiser: RoundToNearest | None = None
) -> int:
    """Bytes that a rank's experts take less on a GPU than in weights of `itemsize`, where they stay narrow.

    A layer's matrices of one shape do if all of them are stored alike. The shared expert is dequantised.
    """
    if config.weight_format is None and quantiser is None:
        return 0
    names, saved = _expert_sources(config), 0
    for at, slot in _of_experts(config):
        forms = {_narrow(config, names[at + each.path].name, each.shape[1], quantiser) for each in slot.tensors}
        if slot.count and len(forms) == 1:
            saved += _saved(slot, shard, forms.pop(), itemsize)
    return saved


def bytes_saved_by_experts(
    config: ModelConfig, itemsize: int, shard: Shard = WHOLE, quantiser: RoundToNearest | None = None
) -> int:
    """Bytes that a rank's experts take less as whole numbers with scales than in weights of `itemsize`, where the
    native library multiplies them: if they are stored so, or quantised while they are read.

    Of MXFP4 all are counted in 8 bits; experts whose numbers fit into 4 take less.
    """
    how = config.weight_format
    if how is None and quantiser is None:
        return 0
    names, saved = _expert_sources(config), 0
    for at, part in ((at, part) for at, slot in _of_experts(config) for part in slot.tensors):
        narrow = _narrow(config, names[at + part.path].name, part.shape[1], quantiser)
        for rows, columns, inputs in _shares(part, shard):
            kept = None if narrow is None else _packed_bytes(rows, columns, narrow, inputs)
            saved += 0 if kept is None else itemsize * len(rows) * len(columns) - kept
    return saved


def _of_experts(config: ModelConfig) -> Iterator[tuple[str, Slot]]:
    """Slots of matrices of experts, the shared ones among them: see `slots_of`."""
    return ((at, slot) for at, slot in slots_of(config) if slot.keep is Keep.EXPERT)


def _expert_sources(config: ModelConfig) -> dict[str, Source]:
    """Where a checkpoint has its parts, by what its configuration says of stacks of experts."""
    how = config.weight_format
    return sources(config, _Stacks() if how is not None and 3 in how.dimensions else ())


class _Stacks:
    """Names of a checkpoint's tensors, as far as they tell that its experts are stacked and quantised."""

    def __contains__(self, name: object) -> bool:
        return str(name).endswith(PACKED)


def _shares(matrix: SlotTensor, shard: Shard) -> Iterator[tuple[range, range, int]]:
    """Rows and columns of the parts of a rank's share of a matrix, and its inputs."""
    outputs, inputs = matrix.shape
    for part in matrix.share(shard.rank, shard.size):
        rows, columns = (*part, slice(None), slice(None))[:2]
        yield range(*rows.indices(outputs)), range(*columns.indices(inputs)), inputs


def _packed_bytes(rows: range, columns: range, narrow: Narrow, inputs: int) -> int | None:
    """Bytes of a share of a matrix as the native library packs it; None if it can't."""
    if narrow.is_float or narrow.bits > max(PACKED_BITS):
        return None
    group = _group_within(columns, narrow, inputs)
    if group < len(columns) and group % MULTIPLE:
        return None
    bits = next(bits for bits in PACKED_BITS if narrow.bits <= bits)
    per_group = torch.float32.itemsize + (torch.bfloat16.itemsize if narrow.has_zeros else 0)
    return len(rows) * (-(-len(columns) * bits // 8) + per_group * -(-len(columns) // group))


def _group_within(columns: range, narrow: Narrow, inputs: int) -> int:
    """Inputs of a group of some columns, which may begin within one of a whole row's."""
    group = narrow.group or inputs
    return len(columns) if columns[0] // group == columns[-1] // group else math.gcd(group, columns[0])


def _narrow(config: ModelConfig, name: str, inputs: int, quantiser: RoundToNearest | None) -> Narrow | None:
    """How a projection is stored, or quantised; None: dequantised, or plain."""
    if quantiser is not None:
        return _of(quantiser, inputs)
    how = config.weight_format
    if how is None or how.plain.has(name.removesuffix(".weight")):
        return None
    return how.narrow(name)


def _of(quantiser: RoundToNearest, inputs: int) -> Narrow:
    return Narrow(quantiser.bits, quantiser.group_of(inputs), is_float=quantiser.is_float)


def _kept_bytes(shape: tuple[int, ...], narrow: Narrow | None) -> int | None:
    """Bytes of a narrow weight `[out, in]` with its float32 scales and zero points; None if it can't be kept so."""
    if narrow is None:
        return None
    outputs, inputs = shape
    bits, group = kept_bits(narrow.bits), narrow.group or inputs
    if not is_kept(inputs, bits, group):
        return None
    return outputs * (inputs * bits // 8 + 4 * -(-inputs // group) * (1 + narrow.has_zeros))


def _kept_expert_bytes(shape: tuple[int, int], narrow: Narrow) -> int | None:
    """The same of an expert's weight, which may be in MXFP4: see `expert_stays_narrow`."""
    outputs, inputs = shape
    if not narrow.mxfp4:
        return _kept_bytes(shape, narrow)
    is_kept = is_kept_float4(inputs) and narrow.group == min(FLOAT4_GROUP, inputs)
    return outputs * (inputs // 2 + -(-inputs // FLOAT4_GROUP)) if is_kept else None


def _saved(slot: Slot, shard: Shard, narrow: Narrow | None, itemsize: int) -> int:
    """Bytes that a rank's shares of experts' weights take less than in weights of `itemsize`."""
    if narrow is None:
        return 0
    saved = 0
    for rows, columns, inputs in (share for part in slot.tensors for share in _shares(part, shard)):
        shape = len(rows), len(columns)
        kept = _kept_expert_bytes(shape, narrow._replace(group=_group_within(columns, narrow, inputs)))
        saved += 0 if kept is None else itemsize * math.prod(shape) - kept
    return saved
