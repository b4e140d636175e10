"""Decoder over the arena, of the layers that a model's configuration describes; see `layers`.

Tests: tests/core/paths, tests/core/test_parity.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...memory.pages.arena import Arena
from ...memory.pages.projections import Role
from ...ops.attention.attention import GroupedAttention, HeadShape
from ...ops.attention.attention_backend import paged_kind
from ...ops.elementwise.elementwise import RotaryEmbedding, Rotation
from ...ops.elementwise.float8_kv import UNSCALED, KvScales
from ...ops.gemm.narrow_weights import NarrowWeight
from ...ops.gemm.packed_gemm import unpack
from ...ops.lora.merge import merge
from ...ops.lora.sgmv import AdapterRows
from ...ops.ranks.ranks import Collectives
from ..requests.types import CannotMerge
from .batch import GemmBackend, GemmKind, StepStates
from .lora.step_lora import PER_LAYER_GEMM, HeadLora, StepLora
from .moe.experts import ExpertKernels
from .moe.stacked_experts import StackedExperts
from .nvtx_spans import span
from .paged_states import PagedStates
from .program.ends import LOGITS, STATES, end_gemms, end_programs, logits_dtype
from .program.layer_program import Kept
from .program.op import PER_LAYER, STREAM
from .program.ops.linear import Gemm
from .program.ops.moe import Moe
from .program.torch_experts import kind_of_experts
from .program.torch_gemm import Weight, kind_of, multiply
from .program.torch_program import Final, TorchProgram
from .program.torch_step import AddedLogits, Batch, Bound, Residual, Runs, Step, batch_of_parts, run_ops
from .specs.config import ModelConfig
from .specs.layers import kv_index, page_index, ropes_of
from .specs.rope_config import RopeConfig
from .weights.end_weights import end_weights
from .weights.kept_weights import expert_packs, matrix_pack, moved
from .weights.layer_weights import LayerWeights
from .weights.rounding_weight import RoundingWeight
from .weights.shadow import INPUTS_ARE_ROUNDED
from .weights.weight_plan import Way
from .weights.weights import Weights


@dataclass(slots=True)
class Flow:
    """Buffers that pieces of a step hand to each other, in memory that does not move: of `bucket` tokens."""

    x: torch.Tensor
    """The residual stream `[tokens, hidden]`."""

    kept: dict[Kept, torch.Tensor]
    """`[tokens, …]`: what `LayerProgram.reads` and `mixed` say, shared by all layers with buffers of one shape, and
    what outlives layers.
    """

    mixed: tuple[Kept, ...]
    """Those which mixers write."""

    lasting: tuple[Kept, ...]
    """Those which outlive layers: several streams of the residual, per-layer embeddings, and what an indexer
    chose.
    """

    @property
    def names(self) -> dict[str, torch.Tensor]:
        """What every piece finds."""
        return {STREAM: self.x} | {each.name: self.kept[each] for each in self.lasting}

    def of(self, tokens: int) -> Flow:
        """The buffers of the first tokens alone, in the same memory."""
        kept = {name: each[:tokens] for name, each in self.kept.items()}
        return Flow(self.x[:tokens], kept, self.mixed, self.lasting)

    def pad(self, tokens: int) -> None:
        """Have zeros for what mixers don't write behind so many tokens."""
        for each in self.mixed:
            self.kept[each][tokens:].zero_()


class GemmUse(NamedTuple):
    """One use of a kind of GEMM: a layer's, or the model's own."""

    name: str
    """The name of its product, or of the model's own."""

    weight: Weight
    layer: int | None = None
    """None: it is the model's own."""

    op: Gemm | None = None

    mixture: tuple[int, Moe] | None = None
    """The layer of a mixture of experts, and its op: `weight` has gate and up of all experts."""


class DecoderModel:
    """Pure computation: weights and arena in, logits out; all of a step's state is in its batch.

    It computes where the arena is: on a CPU with torch, on a GPU with cuBLAS and the fused kernels of `ops`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        arena: Arena,
        max_model_len: int,
        dtype: torch.dtype | None = None,
        ranks: Collectives | None = None,
        *,
        expert_kernels: ExpertKernels = ExpertKernels.NATIVE,
    ) -> None:
        """Read all of `weights`, layer by layer, into the arena's device; requests may have up to `max_model_len`
        tokens. Matrices are kept as `weights.plan` says.

        dtype: what steps on a CPU compute in. In float32, packed copies of the weights are kept, next to the embeddings
        as they are. None: they compute in the weights' own dtype and layout. ranks: the ranks that compute a layer's
        shares with this one; `config` is of a share. Each has its columns of the logits.
        """
        self.config = config
        self._ranks = ranks
        self._arena = arena
        device = arena.pages.device
        table = weights.embed()
        packs = dtype == torch.float32
        self._dtype = dtype = dtype or table.dtype
        if device.type == "cpu" and weights.plan.matrices is Way.LEAVE and weights.rounds_inputs:
            weights.plan = replace(weights.plan, rounds_inputs=True)
        kept = matrix_pack(weights.plan, device, table.dtype, packs=packs)
        self._ends = end_weights(config, weights, table, kept, dtype, device, packs=packs)
        pack_expert, keep_experts = expert_packs(expert_kernels, weights.plan, dtype, device)
        read = zip(weights.layers(kept, pack_expert), config.layers, strict=True)
        own = (config.norm, device, dtype, keep_experts)
        self.layers = [moved(layer, config.composed(spec).slots, *own) for layer, spec in read]
        self._weights: Sequence[LayerWeights] = [*self.layers, self._ends]
        self._merged: Sequence[LayerWeights] = ()
        self.kept_states: torch.Tensor | None = None
        """Normalised states of the last step's kept tokens; to be reset before a captured step, which has none."""
        self._logit_states: torch.Tensor | None = None
        self._prompt_lora: HeadLora | None = None
        ropes, factors = ropes_of(config.layers), weights.rope_factors()
        self._rotary = {rope: _rotary(rope, factors, max_model_len, dtype, device) for rope in ropes}
        self._program = TorchProgram(
            config.programs,
            end_programs(config),
            self._weights,
            Bound(
                arena=arena,
                ranks=ranks,
                kv_index=kv_index(config.layers),
                page_index=page_index(config.layers),
                kv_scales=_kv_scales(weights, arena),
                page_groups=arena.layout.group_of_layer,
                num_layers=config.num_layers,
                max_model_len=max_model_len,
                dtype=dtype,
                device=device,
                gemms=(*config.projections.gemm_shape_of, {Role.PER_LAYER: PER_LAYER_GEMM}),
                rotary=self._rotary,
            ),
        )

    def use_arena(self, arena: Arena) -> None:
        """Keep KV in another arena of the same layout and device from now on."""
        self._arena = self._program.model.arena = arena

    def new_attention(self) -> GroupedAttention:
        layout, device = self._arena.layout, self._arena.pages.device
        pairs = zip(self.heads, layout.group_windows, strict=True)
        firsts = (self.config.kv_layers[group.layers[0]] for group in layout.groups)
        kinds = [paged_kind(layout.value_dim, blocks=each.block_indexer is not None) for each in firsts]
        groups = [(kind(heads, device), window) for kind, (heads, window) in zip(kinds, pairs, strict=True)]
        return GroupedAttention(groups, layout.block_tokens, chunked=layout.chunked)

    @property
    def heads(self) -> list[HeadShape]:
        """Of each page group's layers."""
        layout, layers = self._arena.layout, self.config.kv_layers
        firsts = (layers[group.layers[0]] for group in layout.groups)
        return [HeadShape(it.num_heads, it.num_kv_heads, it.head_dim, layout.block_tokens) for it in firsts]

    def new_states(self) -> PagedStates | None:
        """Where steps have the states of their sequences; None for a model without recurrent mixers."""
        return None if self.config.recurrent is None else PagedStates(self.config, self._arena)

    def close(self) -> None:
        """Nothing outlives the object."""

    def forward(self, batch: Batch, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the step's tokens and write their KV. Returns logits `[logit_tokens, vocab]` float32; of several
        ranks this one's columns, see `gathered`.

        logits: memory for them, in `logits_dtype`; not used for logits to which adapters add something, unless it is
        float32.
        """
        x = self.run_layers(self._embedded(batch), batch)
        return self.compute_logits(x, batch, logits)

    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        """Write the embeddings of a step's tokens to out `[tokens, hidden]`, which `run_layers` takes."""
        out.copy_(self._embedded(batch))

    def _embedded(self, batch: Batch) -> torch.Tensor:
        """Embeddings `[tokens, hidden]` of a step's tokens."""
        return self._run_end(self._program.ends.embed, batch, {})[STREAM]

    def _run_end(self, runs: Runs, batch: Batch, names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run ops of the model's beginning or end on these buffers; returns the buffers afterwards."""
        run_ops(runs, Step(batch, self._weights, names))
        return names

    def run_layers(self, x: torch.Tensor, batch: Batch, per_layer: torch.Tensor | None = None) -> Residual:
        """Compute all layers, from the embeddings x `[tokens, hidden]`, which are changed, to what `compute_logits`
        takes. per_layer: of `make_per_layer_embeddings`; None: they are made here.
        """
        per_layer = self.make_per_layer_embeddings(batch, x) if per_layer is None else per_layer
        names = {STREAM: x} if per_layer is None else {STREAM: x, PER_LAYER: per_layer}
        step, lora, program = self._step(batch, names, batch.states), batch.lora, self._program
        run_ops(program.ends.split, step)
        for index, runs in enumerate(program.layers):
            with span(f"layer.{index}"):
                if lora is not None:
                    lora.wait(index)
                run_ops(runs, step)
        run_ops(program.ends.join, step)
        return Residual(x, None if program.pending is None else names[program.pending])

    def _step(
        self,
        batch: Batch,
        names: dict[str, torch.Tensor],
        states: StepStates | None = None,
        kept: Mapping[Kept, torch.Tensor] = MappingProxyType({}),
    ) -> Step:
        """A step whose ops find these buffers. kept: see `Step.kept`."""
        rotations: dict[RopeConfig | None, Rotation | None] = {None: None}
        for rope, rotary in self._rotary.items():
            rotations[rope] = rotary.at(batch.positions, batch.axes)
        return Step(batch, self._merged if batch.merged else self._weights, names, states, kept, rotations)

    def piece(self, index: int, batch: Batch, flow: Flow) -> None:
        """Compute the part between the mixers number `index - 1` and `index`, of one layer each, or parts of one: the
        rest of the one, and the inputs of the other's, with its keys and values written. The first begins with the
        embedding, the one after the last layer leaves all in the residual stream.

        All pieces, with `mix` between each and the next, and `compute_logits` after the last, are a `forward`.
        """
        names, ends = flow.names, self._program.ends
        step = self._step(batch, names, kept=flow.kept)
        if not index:
            self.embed(batch, flow.x)
            if (per_layer := self.make_per_layer_embeddings(batch, flow.x)) is not None:
                names[PER_LAYER].copy_(per_layer)
            run_ops(ends.split, step)
        runs, reads, leaves = self._program.pieces[index]
        names |= {each.name: flow.kept[each].flatten(1) for each in reads}
        run_ops(runs, step)
        for each in leaves:
            if (found := names[each.name]).data_ptr() != flow.kept[each].data_ptr():
                flow.kept[each].copy_(found)
        if index == len(self.layers_of_mixers):
            run_ops(ends.join, step)

    @property
    def layers_of_mixers(self) -> Sequence[int]:
        """The layer of each `mix`; there is one piece more."""
        return self._program.layer_of

    def mix(self, index: int, batch: Batch, states: StepStates | None, flow: Flow) -> None:
        """Run a layer's mixers, as many as it has, or a part of one, between two pieces."""
        names = {each.name: flow.kept[each] for each in (*flow.lasting, *self._program.segments[index].reads)}
        run_ops(self._program.mixers[index], self._step(batch, names, states, flow.kept))

    def attend(self, index: int, attention: GroupedAttention, q: torch.Tensor) -> torch.Tensor:
        """A layer's attention `[tokens, heads · head_dim]`, alone, of q `[tokens, heads, head_dim]`."""
        return self._program.attend(index, attention, q)

    def new_rows(self, tokens: int) -> torch.Tensor:
        """Zeros `[tokens, hidden]` for a residual stream."""
        return torch.zeros(tokens, self.config.hidden_size, dtype=self._dtype, device=self._arena.pages.device)

    def new_flow(self, tokens: int) -> Flow:
        """Zeros for pieces of up to so many tokens."""
        segments, dtype, device = self._program.segments, self._dtype, self._arena.pages.device
        mixed = tuple({each for segment in segments for each in segment.mixed})
        lasting = self._program.lasting
        every = {each for segment in segments for each in segment.reads}.union(mixed, lasting)
        dtypes = {each: torch.int32 if each.is_index else torch.float32 if each.is_wide else dtype for each in every}
        kept = {each: torch.zeros(tokens, *each.shape, dtype=own, device=device) for each, own in dtypes.items()}
        return Flow(self.new_rows(tokens), kept, mixed, lasting)

    def compute_logits(self, x: Residual, batch: Batch, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the batch's tokens from the last layer's output; see `forward`."""
        self.kept_states, lora, ends = None, batch.lora, self._program.ends
        with span("logits"):
            if batch.kept_tokens is not None:
                self.kept_states = self._final(ends.kept, x, batch)
                self._prompt_lora = None if lora is None else lora.prompt_logits()
            self._logit_states = self._final(ends.states, x, batch)
            head = None if lora is None else lora.logits()
            return self._logits(self._logit_states, batch, None if head is None else head.add, logits)

    def _final(self, final: Final, x: Residual, batch: Batch) -> torch.Tensor:
        """The final norm of some tokens' rows; of all it may be in place."""
        names, pending = {STREAM: x.rows}, self._program.pending
        if x.added is None or pending is None:
            return self._run_end(final.whole, batch, names)[STATES]
        return self._run_end(final.added, batch, {**names, pending: x.added})[STATES]

    def _logits(
        self, states: torch.Tensor, batch: Batch, added: AddedLogits | None, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of final states, in `memory` if it is given. added: see `Step.added_logits`."""
        names = {STATES: states} if memory is None else {STATES: states, LOGITS: memory}
        run_ops(self._program.ends.logits, Step(batch, self._weights, names, added_logits=added))
        return names[LOGITS]

    def new_per_layer_embeddings(self, tokens: int) -> torch.Tensor:
        """Zeros for per-layer embeddings; without columns where they have none."""
        spec, device = self.config.per_layer_embeddings, self._arena.pages.device
        width = 0 if spec is None else self.config.num_layers * spec.size
        return torch.zeros(tokens, width, dtype=self._dtype, device=device)

    def make_per_layer_embeddings(self, batch: Batch, embedded: torch.Tensor) -> torch.Tensor | None:
        """Per-layer embeddings of all layers, `[tokens, layers · size]`; None where they have none.

        embedded: the residual stream before all layers.
        """
        return self._run_end(self._program.ends.per_layer, batch, {STREAM: embedded}).get(PER_LAYER)

    @property
    def bias_dtype(self) -> torch.dtype:
        """See `MergeableModel`."""
        return self._dtype

    def merged_form(self, layer: int, product: str) -> tuple[torch.Size, torch.dtype]:
        """See `MergeableModel.merged_form`."""
        origin = self.layers[layer][product]
        if isinstance(origin, RoundingWeight) or (isinstance(origin, NarrowWeight) and origin.rounds_inputs):
            raise CannotMerge(INPUTS_ARE_ROUNDED)
        return origin.shape, origin.dtype

    def merge(
        self,
        layer: int,
        product: str,
        rows: Sequence[AdapterRows],
        origin: torch.Tensor | NarrowWeight,
        out: torch.Tensor,
    ) -> float:
        """See `MergeableModel.merge`."""
        origin = origin.dense() if isinstance(origin, NarrowWeight) else unpack(origin)
        return merge(
            origin, out, self._arena.pages, layer, parts=rows, modules=self.config.projections.columns(layer, product)
        )

    def use_merged(self, layers: Sequence[LayerWeights] | None) -> None:
        """Have steps that say so take these layers; None: there are none."""
        self._merged = [*layers, self._ends] if layers else ()

    def prompt_logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits `[end - begin, vocab]` float32 of some of the last step's prompt-logprob tokens."""
        added = None if self._prompt_lora is None else partial(self._prompt_lora.add, begin=begin)
        return self.gathered(self._logits(self._kept(begin, end), batch_of_parts(), added))

    def hidden_states(self, begin: int, end: int) -> torch.Tensor:
        """Final hidden states `[end - begin, hidden]` float32 of some of the last step's kept tokens."""
        return self._kept(begin, end).float()

    def logit_states(self, rows: Sequence[int]) -> torch.Tensor:
        """Final hidden states `[rows, hidden]` float32 of some rows of the last step's logits."""
        if self._logit_states is None:
            raise RuntimeError("no step was computed")
        return self._logit_states[list(rows)].float()

    def _kept(self, begin: int, end: int) -> torch.Tensor:
        if self.kept_states is None:
            raise RuntimeError("the last step kept no hidden states")
        return self.kept_states[begin:end]

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' columns, on the first rank; on others no rows."""
        return logits if self._ranks is None else self._ranks.gather(logits, self.config.vocab_size)

    def join(self, ranks: Collectives) -> None:
        """Have these ranks compute the other shares of layers; see `DecoderModel`."""
        self._ranks = self._program.model.ranks = ranks
        self._program.bind()

    @property
    def arena(self) -> Arena:
        """Where KV is kept."""
        return self._arena

    @property
    def logits_width(self) -> int:
        """Columns of the logits that this rank computes."""
        return len(self._ends["head"])

    @property
    def logits_dtype(self) -> torch.dtype:
        """Dtype of the memory that `forward` takes for logits."""
        return logits_dtype(self.config, self._dtype)

    @property
    def ranks(self) -> Collectives | None:
        """The ranks that compute shares with this one; None where it computes all."""
        return self._ranks

    @property
    def dtype(self) -> torch.dtype:
        """What steps compute in."""
        return self._dtype

    def gemms(self, *, every: bool = False) -> dict[GemmKind, list[GemmUse]]:
        """Where the model has GEMMs of each kind: of each GEMM that adapters add to, the first. every: all."""
        found: dict[GemmKind, dict[object, GemmUse]] = {}
        shapes = self.config.projections.gemm_shape_of
        for index, op in self._program.gemms():
            weights = self.layers[index]
            kind = kind_of(weights[op.weight], weights.get(op.bias), silu=op.silu)
            use = GemmUse(op.weight, weights[op.weight], index, op)
            key = index if every else shapes[index][op.weight]
            found.setdefault(kind, {}).setdefault((key, op.weight), use)
        for index, op in self._program.mixtures():
            experts = self.layers[index][op.experts]
            if isinstance(experts, StackedExperts) and experts.can_join(op.spec) and (kind := kind_of_experts(experts)):
                use = GemmUse("experts", experts.gate_up.data, mixture=(index, op))
                found.setdefault(kind, {}).setdefault(index if every else kind, use)
        for slot, name in end_gemms(self.config):
            use = GemmUse(name, self._ends[slot])
            found.setdefault(kind_of(use.weight), {}).setdefault(slot if every else name, use)
        head = self._ends["head"]
        found[kind_of(head, is_head=True)] = {Role.HEAD: GemmUse(Role.HEAD, head)}
        return {kind: list(uses.values()) for kind, uses in found.items()}

    def run_gemm(
        self,
        use: GemmUse,
        backend: GemmBackend,
        x: torch.Tensor,
        lora: StepLora | None = None,
        weights: LayerWeights | None = None,
    ) -> torch.Tensor:
        """A GEMM alone, of x `[rows, in]`, as a step runs it: with what adapters add, and the activation that is
        computed with it; for experts the whole mixture, without adapters. weights: others than the layer's.
        """
        if use.mixture is not None:
            index, mixture = use.mixture
            kind = kind_of_experts(self.layers[index][mixture.experts])
            backends = {} if kind is None or backend is GemmBackend.LIBRARY else {kind: backend}
            return self._program.run_mixture(index, mixture, x, backends)
        if use.layer is None or use.op is None:
            return multiply(backend, x, use.weight)
        own = self.layers[use.layer] if weights is None else weights
        kind = kind_of(own[use.op.weight], own.get(use.op.bias), silu=use.op.silu)
        return self._program.run_gemm(use.layer, use.op, x, {kind: backend}, lora, own)


def _kv_scales(weights: Weights, arena: Arena) -> list[KvScales]:
    """Of each layer with KV."""
    return weights.kv_scales() if arena.layout.float8_kv else [UNSCALED] * arena.layout.num_layers


def _rotary(
    rope: RopeConfig, factors: torch.Tensor | None, positions: int, dtype: torch.dtype, device: torch.device
) -> RotaryEmbedding:
    """factors: of frequencies, where they are learned."""
    angles = rope.angles(positions)
    return RotaryEmbedding(
        angles if factors is None or not rope.is_learned else angles * factors.to(angles.device),
        positions,
        dtype,
        device,
        factor=rope.attention_factor,
        interleaved=rope.interleaved,
        axes=rope.element_axes,
    )
