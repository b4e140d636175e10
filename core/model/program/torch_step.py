"""What the torch interpreter's ops share: a model's state, and one step's.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch

from ....memory.pages.arena import Arena
from ....ops.attention.attention import GroupedAttention
from ....ops.elementwise.elementwise import RotaryEmbedding, Rotation
from ....ops.elementwise.float8_kv import KvScales
from ....ops.ranks.ranks import Collectives
from ..batch import BY_LIBRARY, GemmBackends, StepBatch, StepStates
from ..lora.step_lora import StepLora
from ..nvtx_spans import span
from ..specs.rope_config import RopeConfig
from ..weights.layer_weights import LayerWeights
from .layer_program import Kept
from .op import Read, View

#: Adds what adapters do to logits `[rows, columns]` of states `[rows, hidden]`; then the token of the first column.
AddedLogits = Callable[[torch.Tensor, torch.Tensor, int], None]

#: A step's batch in the form that this interpreter takes.
Batch = StepBatch[GroupedAttention, StepLora]


@dataclass(slots=True)
class Bound:
    """What programs are bound to. It may change between steps: ops look it up when they run."""

    arena: Arena
    ranks: Collectives | None
    kv_index: Sequence[int]
    """For each layer, the place of its KV among those of the arena."""

    page_index: Sequence[int]
    """Of an indexer's keys, likewise."""

    kv_scales: Sequence[KvScales]
    page_groups: Sequence[int]
    num_layers: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device

    gemms: Sequence[Mapping[str, int]] = ()
    """The numbers by which adapters know the GEMMs of each layer, and of the ends, by product: see `StepLora.add`."""

    rotary: Mapping[RopeConfig, RotaryEmbedding] = field(default_factory=dict)
    """Of all positions, by rope."""


class Residual(NamedTuple):
    """The residual stream behind all layers, of which only rows with logits may be needed."""

    rows: torch.Tensor
    """`[tokens, hidden]`."""

    added: torch.Tensor | None = None
    """`[tokens, hidden]`: what the final norm still adds to them."""


@dataclass(slots=True)
class Step:
    """One step of one program: its batch and its buffers."""

    batch: Batch
    layers: Sequence[LayerWeights] | Mapping[int, LayerWeights]
    """Weights of all layers, or merged ones, and behind them those of the model's ends."""

    names: dict[str, torch.Tensor]
    """What each buffer is now."""

    states: StepStates | None = None
    kept: Mapping[Kept, torch.Tensor] = field(default_factory=dict)
    """Memory of buffers that other pieces read; empty for a step that runs at once."""

    rotations: Mapping[RopeConfig | None, Rotation | None] = field(default_factory=dict)
    """The angles of its tokens, for each rope of the model."""

    added_logits: AddedLogits | None = None
    """Adds to logits what adapters do."""


def batch_of_parts(
    attention: GroupedAttention | None = None, backends: GemmBackends = BY_LIBRARY, lora: StepLora | None = None
) -> Batch:
    """The batch of a step in which some ops are run alone: it has no tokens."""
    nothing = torch.empty(0, dtype=torch.long)
    attention = GroupedAttention([], 1) if attention is None else attention
    return StepBatch(nothing, nothing, nothing, nothing, attention, lora, backends=backends)


@dataclass(frozen=True, slots=True)
class OpContext:
    """Where an op stands: in a layer of a model, or behind the last one for an op of its ends."""

    index: int
    weights: LayerWeights
    """The model's own, not merged."""

    model: Bound

    def gemm(self, product: str) -> int:
        """See `Bound.gemms`."""
        return self.model.gemms[self.index][product]

    def reader(self, read: Read) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
        """Looks up a buffer, or its columns."""
        if not isinstance(read, View):
            return itemgetter(read)
        name, columns = read.name, slice(read.begin, read.end)
        if read.copied:
            return lambda names: names[name][:, columns].contiguous()
        return lambda names: names[name][:, columns]


#: Runs one op.
Run = Callable[[Step], None]

#: Ops, each with the buffers that nothing reads after it.
Runs = list[tuple[Run, tuple[str, ...]]]


def run_ops(runs: Runs, step: Step) -> None:
    """Run ops. Buffers are dropped once they are read for the last time: what binds them holds their memory."""
    names = step.names
    for run, dead in runs:
        run(step)
        for name in dead:
            names.pop(name, None)  # an op that chooses among tokens writes nothing where all are seen


def within_span(name: str, runs: Runs) -> Run:
    """Ops as one, in a span."""

    def run(step: Step) -> None:
        with span(name):
            run_ops(runs, step)

    return run
