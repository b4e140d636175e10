"""Bytes of a model's weights as they are kept, by its configuration alone: planners read no checkpoint.

Tests: tests/core/model/test_narrow_bytes.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from ...ops.narrow_weights import FLOAT4_GROUP, is_kept, kept_bits
from ...ops.native_integers import BITS as PACKED_BITS
from ...ops.native_integers import MULTIPLE
from .config import ModelConfig
from .narrow_experts import is_kept_float4
from .quantization.format import Narrow
from .quantization.round_to_nearest import RoundToNearest
from .shard import WHOLE, Part, Shard
from .tensor_names import PACKED
from .tensor_parts import EMBED, IN_LAYER, KV_UP, LM_HEAD, ROUTERS, SHARED, Source, is_of_expert, sources, tensor_shapes


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
    shapes = tensor_shapes(config)
    matrices = {part: shape for part, shape in shapes.items() if len(shape) == 2 and IN_LAYER.match(part)}
    head_name = LM_HEAD if LM_HEAD in shapes else EMBED
    others = itemsize * sum(math.prod(shapes[part]) for part in shapes.keys() - matrices.keys() - {head_name})
    every = (each for layer in config.projections.layers for each in layer)
    experts = itemsize * sum(each.num_weights for each in every if each.experts)
    head = itemsize * math.prod(shapes[head_name])
    if quantiser is not None and quantiser.lm_head:
        others += 0 if head_name == LM_HEAD else head  # the embeddings are kept as well
        vocab, hidden = shapes[head_name]
        head = _kept_bytes((vocab, hidden), _of(quantiser, hidden)) or head
    projections, dense = _of_projections(config, matrices, itemsize, quantiser)
    kept_experts = experts - bytes_saved_by_stacks(config, itemsize, quantiser=quantiser)
    return WeightBytes(projections - experts, dense, head, kept_experts, others)


def bytes_saved_by_stacks(
    config: ModelConfig, itemsize: int, shard: Shard = WHOLE, quantiser: RoundToNearest | None = None
) -> int:
    """Bytes that a rank's experts take less on a GPU than in weights of `itemsize`, where they stay narrow.

    A layer's matrices of one shape do if all of them are stored alike. The shared expert is dequantised.
    """
    if config.weight_format is None and quantiser is None:
        return 0
    names = _expert_sources(config)
    every = {part: shape for part, shape in _experts(config).items() if f".{SHARED}." not in part}
    forms = {part: _narrow(config, names[part].name, inputs, quantiser) for part, (_, inputs) in every.items()}
    stacks = (list(parts) for _, parts in groupby(sorted(every, key=_stack_of), _stack_of))
    alike = (part for parts in stacks if len({forms[part] for part in parts}) == 1 for part in parts)
    return sum(
        _saved(rows, columns, forms[part], every[part][1], itemsize)
        for part in alike
        for rows, columns in _shares(shard.of_tensor(part, config), *every[part])
    )


def _stack_of(part: str) -> tuple[str, bool]:
    """The layer of an expert's matrix, and whether it is down's: gate and up are one matrix."""
    layer, _, path = part.partition(".experts.")
    return layer, "down_proj" in path


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
    for part, (outputs, inputs) in _experts(config).items():
        narrow = _narrow(config, names[part].name, inputs, quantiser)
        for rows, columns in _shares(shard.of_tensor(part, config), outputs, inputs):
            kept = None if narrow is None else _packed_bytes(rows, columns, narrow, inputs)
            saved += 0 if kept is None else itemsize * len(rows) * len(columns) - kept
    return saved


def _expert_sources(config: ModelConfig) -> dict[str, Source]:
    """Where a checkpoint has its parts, by what its configuration says of stacks of experts."""
    how = config.weight_format
    return sources(config, _Stacks() if how is not None and 3 in how.dimensions else ())


class _Stacks:
    """Names of a checkpoint's tensors, as far as they tell that its experts are stacked and quantised."""

    def __contains__(self, name: object) -> bool:
        return str(name).endswith(PACKED)


def _experts(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes of all matrices of experts, the shared ones among them, by their names in `tensor_shapes`."""
    shapes = tensor_shapes(config).items()
    return {part: (shape[0], shape[1]) for part, shape in shapes if len(shape) == 2 and is_of_expert(part)}


def _shares(parts: Sequence[Part], outputs: int, inputs: int) -> Iterator[tuple[range, range]]:
    """Rows and columns of the parts of a matrix."""
    for part in parts:
        rows, columns = (*part, slice(None), slice(None))[:2]
        yield range(*rows.indices(outputs)), range(*columns.indices(inputs))


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


def _of_projections(
    config: ModelConfig, matrices: Mapping[str, tuple[int, ...]], itemsize: int, quantiser: RoundToNearest | None
) -> tuple[int, int]:
    """Bytes of these parts, and `WeightBytes.dense`; parts of mixtures in the model's dtype."""
    names, projections, dense = sources(config, ()), 0, 0
    for part, (outputs, inputs) in matrices.items():
        num_bytes, kept = itemsize * outputs * inputs, None
        if not (is_of_expert(part) or part.endswith((*ROUTERS, KV_UP))):
            kept = _kept_bytes((outputs, inputs), _narrow(config, names[part].name, inputs, quantiser))
        projections += num_bytes if kept is None else kept
        dense += 0 if kept is None else num_bytes
    return projections, dense


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


def _saved(rows: range, columns: range, narrow: Narrow | None, inputs: int, itemsize: int) -> int:
    """Bytes that a share of an expert's weight takes less than one of `itemsize`."""
    if narrow is None:
        return 0
    shape = len(rows), len(columns)
    kept = _kept_expert_bytes(shape, narrow._replace(group=_group_within(columns, narrow, inputs)))
    return 0 if kept is None else itemsize * math.prod(shape) - kept
