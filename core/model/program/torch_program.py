"""Programs of all layers and of the ends, bound to a model: run at once, or in pieces between which mixers stand.

Tests: tests/core/test_families.py, tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ....ops.attention.attention import GroupedAttention
from ..batch import BY_LIBRARY, GemmBackends
from ..lora.step_lora import StepLora
from ..weights.layer_weights import LayerWeights
from .ends import LOGITS, STATES, EndPrograms
from .layer_program import Kept, LayerProgram
from .op import STREAM, Op, name_of
from .ops.attend import Attend
from .ops.latents import LatentAttend
from .ops.linear import Gemm
from .ops.moe import Moe
from .ops.residual import Add
from .ops.spans import Begin, End
from .peepholes import fused, fused_layers
from .torch_step import Bound, OpContext, Runs, Step, batch_of_parts, run_ops, within_span

#: What a GEMM reads that is run alone.
_ALONE, _ROUTED_ALONE = "alone", "routed_alone"


class Piece(NamedTuple):
    """The ops behind the mixers of a layer, and those before the mixers of the next one."""

    runs: Runs
    reads: tuple[Kept, ...]
    """What others left for it, and it for others."""

    leaves: tuple[Kept, ...]


class Final(NamedTuple):
    """Ops that make final states of some tokens."""

    whole: Runs
    """Where the residual stream is whole."""

    added: Runs
    """Where they add what the last layer has left apart."""


class Ends(NamedTuple):
    """The parts of `EndPrograms`."""

    embed: Runs
    per_layer: Runs
    split: Runs
    join: Runs
    kept: Final
    states: Final
    logits: Runs


class TorchProgram:
    """The programs of all layers and of a model's ends, bound to the model."""

    def __init__(
        self, programs: Sequence[LayerProgram], ends: EndPrograms, weights: Sequence[LayerWeights], model: Bound
    ) -> None:
        """weights: of all layers, and behind them those of the model's ends."""
        self.programs, self._end_programs, self._layers, self.model = programs, ends, weights, model
        self.lasting = ends.lasting
        """Buffers besides the residual stream that outlive layers."""
        self.segments = [each for program in programs for each in program.segments]
        """The programs of all layers, cut at each mixer: a layer is as many as its program has parts."""
        self.layer_of = [index for index, program in enumerate(programs) for _ in program.segments]
        """The layer of each segment."""
        self.bind()

    def bind(self) -> None:
        """Bind the programs: again, after the model's ranks have changed."""
        programs = self.programs
        self._whole, last = fused_layers([program.ops for program in programs])
        if last is not None and self._end_programs.join:  # which reads what is added
            self._whole[-1].append(last)
            last = None
        self.pending = None if last is None else last.y
        behind = [*(_reads(ops) for ops in self._whole[1:]), set() if last is None else {last.y}]
        self.layers = [
            self._bound(index, ops, live) for index, (ops, live) in enumerate(zip(self._whole, behind, strict=True))
        ]
        self.mixers = [
            self._bound(layer, segment.mixers, {kept.name for kept in segment.mixed})
            for layer, segment in zip(self.layer_of, self.segments, strict=True)
        ]
        self.pieces = [self._piece(index) for index in range(len(self.segments) + 1)]
        self.ends = self._bound_ends(last)

    def _bound_ends(self, pending: Add | None) -> Ends:
        """pending: what the last layer's end adds."""
        ends = self._end_programs

        def bound(ops: Sequence[Op], *live: str) -> Runs:
            return self._bound(len(self.programs), fused(ops), set(live))

        def final(ops: Sequence[Op]) -> Final:
            added = ops if pending is None else (pending, *ops)
            return Final(bound(ops, STATES), bound(added, STATES))

        return Ends(
            embed=bound(ends.embed),
            per_layer=bound(ends.per_layer),
            split=bound(ends.split),
            join=bound(ends.join),
            kept=final(ends.kept),
            states=final(ends.states),
            logits=bound(ends.logits, STATES, LOGITS),
        )

    def _piece(self, index: int) -> Piece:
        """The ops between the mixers of a segment and those of the next one."""
        around = (None, *self.segments, None)
        last, following = around[index], around[index + 1]
        first: list[Op] = [] if last is None else fused(last.after)
        second: list[Op] = [] if following is None else fused(following.before, {it.name for it in following.reads})
        leaves = following.reads if following is not None and second else ()
        kept = {each.name for each in leaves}
        if first and second and isinstance(first[-1], Add):
            second = fused([first.pop(), *second])
        before, behind = self.layer_of[max(0, index - 1)], self.layer_of[min(index, len(self.segments) - 1)]
        runs = self._bound(before, first, kept | _reads(second)) + self._bound(behind, second, kept)
        return Piece(runs, _left_for([*first, *second], last), leaves)

    def _bound(self, index: int, ops: Sequence[Op], live: set[str]) -> Runs:
        """live: what is read behind them."""
        found: Runs = []
        lasting = {STREAM, *(each.name for each in self.lasting)}
        outer: list[tuple[str, Runs]] = []
        for op, dead in zip(ops, _last_reads(ops, live | lasting), strict=True):
            if isinstance(op, Begin):
                outer.append((op.name, found))
                found = []
            elif isinstance(op, End):
                name, around = outer.pop()
                around.append((within_span(name, found), ()))
                found = around
            else:
                found.append((op.torch(OpContext(index, self._layers[index], self.model)), dead))
        return found

    def attend(self, index: int, attention: GroupedAttention, q: torch.Tensor) -> torch.Tensor:
        """A layer's attention alone, of q `[tokens, heads, head_dim]`, where no indexer chooses what it attends to.
        Relative states are zeros.
        """
        own = next(op for op in self.programs[index].ops if isinstance(op, Attend | LatentAttend))
        names, relative = {own.q: q}, own.attention.relative
        if relative is not None and isinstance(own, Attend) and own.relative is not None:
            names[own.relative] = q.new_zeros(len(q), own.attention.num_heads * relative.dim)
        step = Step(batch_of_parts(attention), self._layers, names)
        run_ops(self._bound(index, [own], {own.out}), step)
        return step.names[own.out]

    def gemms(self) -> Iterator[tuple[int, Gemm]]:
        """The GEMMs of all layers as a step runs them, each with its layer."""
        return ((index, op) for index, ops in enumerate(self._whole) for op in ops if isinstance(op, Gemm))

    def mixtures(self) -> Iterator[tuple[int, Moe]]:
        """The mixtures of experts of all layers, each with its layer."""
        return ((index, op) for index, ops in enumerate(self._whole) for op in ops if isinstance(op, Moe))

    def run_mixture(self, index: int, op: Moe, x: torch.Tensor, backends: GemmBackends) -> torch.Tensor:
        """A mixture of `mixtures` alone, of x `[rows, hidden]`, which its router gets, too, unless that takes rows of
        another width: then it gets zeros.
        """
        size = op.spec.router_inputs(x.shape[1])
        is_other = size != x.shape[1]
        names = {_ALONE: x} | ({_ROUTED_ALONE: x.new_zeros(len(x), size)} if is_other else {})
        step = Step(batch_of_parts(backends=backends), self._layers, names)
        alone = replace(op, x=_ALONE, routed=_ROUTED_ALONE if is_other else None)
        run_ops(self._bound(index, [alone], {op.out}), step)
        return step.names[op.out]

    def run_gemm(
        self,
        index: int,
        op: Gemm,
        x: torch.Tensor,
        backends: GemmBackends = BY_LIBRARY,
        lora: StepLora | None = None,
        weights: LayerWeights | None = None,
    ) -> torch.Tensor:
        """A GEMM of `gemms` alone, of x `[rows, in]`. weights: others than the layer's."""
        layers = self._layers if weights is None else {index: weights}
        step = Step(batch_of_parts(backends=backends, lora=lora), layers, {_ALONE: x})
        run_ops(self._bound(index, [replace(op, x=_ALONE)], {op.out}), step)
        return step.names[op.out]


def _left_for(ops: Sequence[Op], last: LayerProgram | None) -> tuple[Kept, ...]:
    """The outputs of a segment and its mixers that the ops read."""
    needed = _reads(ops)
    return () if last is None else tuple(each for each in (*last.mixed, *last.reads) if each.name in needed)


def _reads(ops: Sequence[Op]) -> set[str]:
    """Buffers that ops read before any of them writes them."""
    found, written = set[str](), set[str]()
    for op in ops:
        found |= set(map(name_of, op.reads)) - written
        written |= set(op.writes)
    return found


def _last_reads(ops: Sequence[Op], live: set[str]) -> list[tuple[str, ...]]:
    """For each op the buffers that nothing reads after it, and that it reads or writes."""
    found: list[tuple[str, ...]] = []
    for op in reversed(ops):
        reads, writes = set(map(name_of, op.reads)), set(op.writes)
        found.append(tuple(sorted((reads | writes) - live)))
        live = (live - writes) | reads
    return found[::-1]
