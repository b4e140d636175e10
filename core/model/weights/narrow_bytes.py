"""Bytes of a model's weights as they are kept, by its configuration alone: planners read no checkpoint.

Tests: tests/core/model/weights/test_narrow_bytes.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..checkpoints.quantization.format import Narrow
from ..checkpoints.quantization.round_to_nearest import RoundToNearest
from ..specs.config import ModelConfig
from ..specs.tensor_names import PACKED
from .shard import WHOLE, Shard
from .slot import Keep, Slot, SlotTensor, num_elems
from .tensor_parts import EMBED, LM_HEAD, Source, model_parts, slots_of, sources
from .weight_plan import LEFT, NARROW, Way, WeightPlan


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
    """Bytes of a model of weights of `itemsize` bytes on a GPU, where they are not kept narrow.

    quantiser: quantises the projections while they are read; else they are as the checkpoint's configuration says.
    """
    projections = dense = experts = others = 0
    counts = _Counts(config, itemsize, NARROW, quantiser=quantiser)
    for slot, part, kept, is_narrow in counts.of_layers():
        if slot.count and slot.keep is Keep.EXPERT:
            experts += kept
        elif len(part.shape) == 2:
            projections += kept
            dense += counts.dense(part) if is_narrow else 0
        else:
            others += kept
    parts, narrow = model_parts(config), counts.narrow_head()
    head_name = LM_HEAD if LM_HEAD in parts else EMBED
    others += sum(counts.dense(part) for name, part in parts.items() if name != head_name)
    head = counts.dense(parts[head_name])
    if narrow is not None and head_name == EMBED:
        others += head  # the embeddings are kept as well
    return WeightBytes(projections, dense, head if narrow is None else narrow, experts, others)


def kept_bytes(
    config: ModelConfig,
    itemsize: int,
    plan: WeightPlan = LEFT,
    shard: Shard = WHOLE,
    quantiser: RoundToNearest | None = None,
) -> int:
    """Bytes of a rank's weights, of `itemsize` each unless the plan keeps them narrow."""
    counts, parts = _Counts(config, itemsize, plan, shard, quantiser), model_parts(config)
    if (narrow := counts.narrow_head()) is not None:
        parts.pop(LM_HEAD, None)  # tied embeddings are kept as well
    return sum(kept for _, _, kept, _ in counts.of_layers()) + sum(map(counts.dense, parts.values())) + (narrow or 0)


def bytes_saved_by_experts(
    config: ModelConfig,
    itemsize: int,
    plan: WeightPlan,
    shard: Shard = WHOLE,
    quantiser: RoundToNearest | None = None,
) -> int:
    """Bytes that a rank's experts take less as the plan keeps them than in weights of `itemsize`.

    MXFP4 weights on a CPU are counted at 8 bits each; experts whose values fit in 4 bits take less.
    """
    counts = _Counts(config, itemsize, plan, shard, quantiser)
    return sum(counts.dense(part) - kept for slot, part, kept, _ in counts.of_layers() if slot.keep is Keep.EXPERT)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts bytes of a rank's shares of parts."""

    config: ModelConfig
    itemsize: int
    plan: WeightPlan
    shard: Shard = WHOLE
    quantiser: RoundToNearest | None = None

    def dense(self, part: SlotTensor) -> int:
        """Bytes of a part in the model's dtype."""
        return self.itemsize * num_elems(part, self.shard.rank, self.shard.size)

    def narrow_head(self) -> int | None:
        """Bytes of the output projection; None: it is not kept narrow."""
        if self.quantiser is None or not self.quantiser.lm_head:
            return None
        tokens, hidden = self.shard.of_vocab(self.config), self.config.hidden_size
        kept = self.plan.of(_of(self.quantiser, hidden), hidden)
        return kept.num_bytes(tokens.stop - tokens.start, hidden, self.itemsize) if kept.bits else None

    def of_layers(self) -> Iterator[tuple[Slot, SlotTensor, int, bool]]:
        """All parts of layers, each with its bytes as it is kept, and whether it is kept narrow."""
        is_plain = self.config.weight_format is None and self.quantiser is None
        names = {} if is_plain else _sources(self.config)
        for at, slot, parts in self._slots():
            if is_plain or slot.keep not in (Keep.MATRIX, Keep.EXPERT):
                yield from ((slot, part, self.dense(part), False) for part in parts)
            else:
                forms = self._forms(slot, [names[at + part.path].name for part in parts], parts)
                pairs = zip(parts, forms, strict=True)
                yield from ((slot, part, *self._kept(slot, part, form)) for part, form in pairs)

    def _slots(self) -> Iterator[tuple[str, Slot, list[SlotTensor]]]:
        """The rank's slots, with the parts of each: those that a checkpoint has, and numbers beside them."""
        every = ((at, slot) for at, slot in slots_of(self.config) if not (slot.first_rank and self.shard.rank))
        kept = ((at, slot) for at, slot in every if slot.keep not in (Keep.UNUSED, Keep.TABLE))
        held = Keep.PLAIN, Keep.NORM  # also where no checkpoint has them, as ones are made
        return ((at, slot, [part for part in slot.tensors if not part.made or slot.keep in held]) for at, slot in kept)

    def _forms(self, slot: Slot, names: Sequence[str], parts: Sequence[SlotTensor]) -> Sequence[Narrow | None]:
        """How the matrices of a slot are stored. On a GPU, experts of a layer must lie in memory alike."""
        found = [self._stored(name, part.shape[1]) for name, part in zip(names, parts, strict=True)]
        must_be_alike = slot.keep is Keep.EXPERT and self.plan.experts is Way.NARROW
        return [None] * len(found) if must_be_alike and len(set(found)) > 1 else found

    def _stored(self, name: str, inputs: int) -> Narrow | None:
        """How a matrix is stored, or quantised; None: dequantised, or plain."""
        if self.quantiser is not None:
            return _of(self.quantiser, inputs)
        how = self.config.weight_format
        return None if how is None or how.plain.has(name.removesuffix(".weight")) else how.narrow(name)

    def _kept(self, slot: Slot, part: SlotTensor, stored: Narrow | None) -> tuple[int, bool]:
        if stored is None:
            return self.dense(part), False
        (outputs, inputs), found, is_narrow = part.shape, 0, False
        for share in part.share(self.shard.rank, self.shard.size):
            rows, columns = (*share, slice(None), slice(None))[:2]
            rows, columns = range(*rows.indices(outputs)), range(*columns.indices(inputs))
            own = stored._replace(group=_group_within(columns, stored, inputs))
            kept = self.plan.of(own, len(columns))
            if slot.keep is Keep.EXPERT:
                kept = self.plan.of_expert(own, len(columns), is_shared=not slot.count)
            found, is_narrow = found + kept.num_bytes(len(rows), len(columns), self.itemsize), kept.bits > 0
        return found, is_narrow


def _sources(config: ModelConfig) -> dict[str, Source]:
    """Where a checkpoint has its parts, by what its configuration says of stacks of experts."""
    how = config.weight_format
    return sources(config, _Stacks() if how is not None and 3 in how.dimensions else ())


class _Stacks:
    """Names of a checkpoint's tensors, as far as they tell that its experts are stacked and quantised."""

    def __contains__(self, name: object) -> bool:
        return str(name).endswith(PACKED)


def _group_within(columns: range, narrow: Narrow, inputs: int) -> int:
    """Inputs of a group of some columns, which may begin within one of a whole row's."""
    group = narrow.group or inputs
    return len(columns) if columns[0] // group == columns[-1] // group else math.gcd(group, columns[0])


def _of(quantiser: RoundToNearest, inputs: int) -> Narrow:
    return Narrow(quantiser.bits, quantiser.group_of(inputs), is_float=quantiser.is_float)
