"""Decoder over the arena, of the layers that a model's configuration describes; see `layers`.

Tests: tests/core/paths, tests/core/test_parity.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn.functional import embedding

from ...memory.pages.arena import Arena
from ...memory.pages.projections import Group
from ...ops.attention.attention import GroupedAttention, HeadShape, PagedAttention
from ...ops.attention.latent_attention import LatentAttention
from ...ops.elementwise.elementwise import RotaryEmbedding, Rotation
from ...ops.elementwise.float8_kv import UNSCALED, KvScales
from ...ops.gemm.narrow_weights import NarrowWeight
from ...ops.gemm.packed_gemm import unpack
from ...ops.lora.merge import merge
from ...ops.lora.sgmv import AdapterRows
from ...ops.ranks.ranks import Collectives
from ..requests.types import CannotMerge
from .batch import GemmBackend, GemmKind, StepStates
from .checkpoints.quantization.groups import plain
from .layer_inputs import LayerInputs
from .lora.lora_state import lora_groups
from .lora.step_lora import HeadLora, StepLora
from .moe.experts import ExpertKernels
from .nvtx_spans import span
from .paged_states import PagedStates
from .program.builder import Kept, layer_program
from .program.ops import FURTHER, STREAM, STREAMS, Gemm
from .program.torch_ops import Weight, backend_for, kind_of, multiply, normed, run_ops
from .program.torch_program import TorchProgram
from .program.torch_step import Batch, Bound, Residual, Step
from .specs.config import ModelConfig
from .specs.layers import kv_index, ropes_of
from .specs.rope_config import RopeConfig
from .streams import streams_of
from .weights.kept_weights import expert_packs, matrix_pack, moved, moved_norm
from .weights.layer_weights import LayerWeights
from .weights.rounding_weight import RoundingWeight
from .weights.shadow import INPUTS_ARE_ROUNDED
from .weights.slots import MERGED_MATRICES, slots
from .weights.weight_plan import Way
from .weights.weights import Pack, Weights


@dataclass(slots=True)
class Flow:
    """Buffers that pieces of a step hand to each other, in memory that does not move: of `bucket` tokens."""

    x: torch.Tensor
    """The residual stream `[tokens, hidden]`."""

    streams: torch.Tensor
    """`[tokens, streams · hidden]`: what layers have in its place where the residual is several streams, no columns
    where it is one.
    """

    inputs: torch.Tensor
    """`[tokens, layers · size]`: further inputs of layers; no columns where they have none."""

    kept: dict[Kept, torch.Tensor]
    """`[tokens, …]`: what `LayerProgram.reads` and `mixed` say, shared by all layers with buffers of one shape."""

    mixed: tuple[Kept, ...]
    """Those which mixers write."""

    def of(self, tokens: int) -> Flow:
        """The buffers of the first tokens alone, in the same memory."""
        kept = {name: each[:tokens] for name, each in self.kept.items()}
        return Flow(self.x[:tokens], self.streams[:tokens], self.inputs[:tokens], kept, self.mixed)

    def pad(self, tokens: int) -> None:
        """Have zeros for what mixers don't write behind so many tokens."""
        for each in self.mixed:
            self.kept[each][tokens:].zero_()


class GemmUse(NamedTuple):
    """One use of a kind of GEMM: a layer's, or the model's own."""

    name: str
    """The name of its group of projections, or of the model's own."""

    weight: Weight
    layer: int | None = None
    """None: it is the model's own."""

    op: Gemm | None = None


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
        embed = weights.embed()
        head = weights.quantised_head(embed)
        packs = dtype == torch.float32
        self._dtype = dtype = dtype or embed.dtype
        self._embed = embed.to(device)
        if device.type == "cpu" and weights.plan.matrices is Way.LEAVE and weights.rounds_inputs:
            weights.plan = replace(weights.plan, rounds_inputs=True)
        kept = matrix_pack(weights.plan, device, embed.dtype, packs=packs)
        self._lm_head = self._embed
        if packs or head is not embed:
            self._lm_head = plain(head, embed.dtype) if kept is None else kept(head)
        self._head_bias = None if (bias := weights.lm_head_bias()) is None else bias.to(device)
        pack_expert, keep_experts = expert_packs(expert_kernels, weights.plan, dtype, device)
        read = zip(weights.layers(kept, pack_expert), config.layers, strict=True)
        own = (config.norm, device, dtype, keep_experts)
        self.layers = [moved(layer, slots(spec, config), *own) for layer, spec in read]
        self._merged: Sequence[LayerWeights] = ()
        self._groups = lora_groups(config.projections)
        self._norm = moved_norm(weights.norm(), config.norm, device, dtype)
        self._inputs = self._layer_inputs(weights, kept, device)
        self._streams = streams_of(config, weights, kept)
        self._media = None if (media := weights.media()) is None else media.to(device, dtype)
        self._embedding_factor = config.embedding_factor(embed.dtype)
        self.kept_states: torch.Tensor | None = None
        """Normalised states of the last step's kept tokens; to be reset before a captured step, which has none."""
        self._logit_states: torch.Tensor | None = None
        self._prompt_lora: HeadLora | None = None
        self._rotary = {rope: _rotary(rope, max_model_len, dtype, device) for rope in ropes_of(config.layers)}
        self._program = TorchProgram(
            [layer_program(layer, config.norm) for layer in config.layers],
            self.layers,
            Bound(
                arena=arena,
                ranks=ranks,
                kv_index=kv_index(config.layers),
                kv_scales=_kv_scales(weights, arena),
                page_groups=arena.layout.group_of_layer,
                max_model_len=max_model_len,
                dtype=dtype,
                device=device,
            ),
        )

    def use_arena(self, arena: Arena) -> None:
        """Keep KV in another arena of the same layout and device from now on."""
        self._arena = self._program.model.arena = arena

    def new_attention(self) -> GroupedAttention:
        layout, device = self._arena.layout, self._arena.pages.device
        pairs = zip(self.heads, layout.group_windows, strict=True)
        kind = PagedAttention if layout.value_dim is None else LatentAttention
        groups = [(kind(heads, device), window) for heads, window in pairs]
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
        """Compute the step's tokens and write their KV. Returns logits `[logit_tokens, vocab]` float32, in `logits` if
        that is given; of several ranks this one's columns, see `gathered`.
        """
        x = self.run_layers(self._embedded(batch).to(self._dtype), batch)
        return self.compute_logits(x, batch, logits)

    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        """Write the embeddings of a step's tokens to out `[tokens, hidden]`, which `run_layers` takes."""
        out.copy_(self._embedded(batch))

    def run_layers(self, x: torch.Tensor, batch: Batch, inputs: torch.Tensor | None = None) -> Residual:
        """Compute all layers, from the embeddings x `[tokens, hidden]`, which are changed, to what `compute_logits`
        takes. inputs: of `make_inputs`; None: they are made here.
        """
        inputs = self.make_inputs(batch, x) if inputs is None else inputs
        step, lora, pending = self._step(batch, {STREAM: x}, batch.states), batch.lora, self._program.pending
        if self._streams is not None:
            step.names[STREAMS] = self._streams.split(x, self._streams.within(x), batch.backends)
        for index, runs in enumerate(self._program.layers):
            with span(f"layer.{index}"):
                if lora is not None:
                    lora.wait(index)
                if inputs is not None:
                    step.names[FURTHER] = self._further(inputs, index)
                run_ops(runs, step)
        if self._streams is not None:
            self._streams.join(step.names[STREAMS], x, batch.backends)
        return Residual(x, None if pending is None else step.names[pending])

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
        return Step(batch, self._merged if batch.merged else self.layers, names, states, kept, rotations)

    def _further(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        """A layer's share of `make_inputs`."""
        return inputs.view(len(inputs), len(self.layers), -1)[:, index]

    def piece(self, index: int, batch: Batch, flow: Flow) -> None:
        """Compute the part between the mixers of layer `index - 1` and those of layer `index`: the rest of the one, and
        the inputs of the other's, with its keys and values written. The first begins with the embedding, the one after
        the last layer leaves all in the residual stream.

        Pieces 0 … layers, with `mix` between each and the next, and `compute_logits` after the last, are a `forward`.
        """
        names = {STREAM: flow.x}
        if self._streams is not None:
            names[STREAMS] = self._streams.within(flow.x, flow.streams)
        if not index:
            self.embed(batch, flow.x)
            if (inputs := self.make_inputs(batch, flow.x)) is not None:
                flow.inputs.copy_(inputs)
            if self._streams is not None:
                self._streams.split(flow.x, names[STREAMS])
        if index and self._inputs is not None:
            names[FURTHER] = self._further(flow.inputs, index - 1)
        runs, reads, leaves = self._program.pieces[index]
        names |= {each.name: flow.kept[each].flatten(1) for each in reads}
        run_ops(runs, self._step(batch, names, kept=flow.kept))
        for each in leaves:
            if (found := names[each.name]).data_ptr() != flow.kept[each].data_ptr():
                flow.kept[each].copy_(found)
        if index == len(self.layers) and self._streams is not None:
            self._streams.join(names[STREAMS], flow.x)

    def mix(self, index: int, batch: Batch, states: StepStates | None, flow: Flow) -> None:
        """Run a layer's mixers, as many as it has, between two pieces."""
        names = {each.name: flow.kept[each] for each in self._program.programs[index].reads}
        run_ops(self._program.mixers[index], self._step(batch, names, states, flow.kept))

    def attend(self, index: int, attention: GroupedAttention, q: torch.Tensor) -> torch.Tensor:
        """A layer's attention `[tokens, heads · head_dim]`, alone, of q `[tokens, heads, head_dim]`."""
        return self._program.attend(index, attention, q)

    def new_rows(self, tokens: int) -> torch.Tensor:
        """Zeros `[tokens, hidden]` for a residual stream."""
        return torch.zeros(tokens, self.config.hidden_size, dtype=self._dtype, device=self._arena.pages.device)

    def new_flow(self, tokens: int) -> Flow:
        """Zeros for pieces of up to so many tokens."""
        programs, dtype, device = self._program.programs, self._dtype, self._arena.pages.device
        mixed = tuple({each for program in programs for each in program.mixed})
        kept = {each for program in programs for each in program.reads}.union(mixed)
        streams = 0 if self._streams is None else self._streams.width
        return Flow(
            x=self.new_rows(tokens),
            streams=torch.zeros(tokens, streams, dtype=dtype, device=device),
            inputs=self.new_inputs(tokens),
            kept={each: torch.zeros(tokens, *each.shape, dtype=dtype, device=device) for each in kept},
            mixed=mixed,
        )

    def compute_logits(self, x: Residual, batch: Batch, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the batch's tokens from the last layer's output; see `forward`."""
        self.kept_states, lora = None, batch.lora
        with span("logits"):
            if batch.kept_tokens is not None:
                self.kept_states = self._final(x, batch.kept_tokens)
                self._prompt_lora = None if lora is None else lora.prompt_logits()
            self._logit_states = normed = self._final(x, batch.logit_tokens)
            backend = backend_for(batch.backends, self._lm_head, is_head=True)
            found = multiply(backend, normed, self._lm_head)
            found = found.float() if logits is None else logits.copy_(found)
            if lora is not None and (head := lora.logits()) is not None:
                head.add(found, normed, self._first_token)
            return self._capped(found)

    def _final(self, x: Residual, tokens: torch.Tensor | None) -> torch.Tensor:
        """The final norm of some tokens' rows; None: of all, in place."""
        rows, added = x if tokens is None else (None if each is None else each[tokens] for each in x)
        assert rows is not None, "there is a residual stream"
        return normed(rows, self._norm, self.config.norm, added)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """See `capped`. Tokens that adapters have rows of keep the model's bias."""
        if self._head_bias is not None:
            logits.add_(self._head_bias)
        return capped(logits, self.config)

    def _embedded(self, batch: Batch) -> torch.Tensor:
        """Embeddings `[tokens, hidden]` of a step's tokens."""
        lora, token_ids = batch.lora, batch.token_ids
        rows = embedding(token_ids if lora is None else lora.known(token_ids), self._embed)
        if lora is not None:
            lora.embed(rows, batch.token_ids)
        rows = rows if self._embedding_factor == 1.0 else rows * self._embedding_factor
        if self._media is not None:
            rows = self._with_media(rows, token_ids, self._media)
        if self.config.embedding_norm:
            rows = normed(rows.to(self._dtype), self._norm, self.config.norm)
        if (media := batch.media) is not None:
            own = media.part(0, rows.shape[1]).to(rows.device, rows.dtype)
            rows = rows.index_copy(0, media.places.to(rows.device), own)
        return rows

    def _with_media(self, rows: torch.Tensor, token_ids: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        """Embeddings `[tokens, hidden]`, those of tokens of images and sound replaced by their own."""
        places = token_ids - self.config.media[0].first
        own = embedding(places.clamp(0, len(media) - 1), media)
        return torch.where((places >= 0)[:, None], own, rows.to(own.dtype))

    def _layer_inputs(self, weights: Weights, kept: Pack | None, device: torch.device) -> LayerInputs | None:
        """None for a model whose layers have no further inputs."""
        config = self.config
        if (spec := config.layer_inputs) is None:
            return None
        table, project, norm = weights.layer_inputs(kept)
        norm = moved_norm(norm, config.norm, device, self._dtype)
        return LayerInputs(spec, table.to(device), project, norm, config.norm.eps)

    def new_inputs(self, tokens: int) -> torch.Tensor:
        """Zeros for further inputs of layers; without columns where they have none."""
        spec, device = self.config.layer_inputs, self._arena.pages.device
        width = 0 if spec is None else self.config.num_layers * spec.size
        return torch.zeros(tokens, width, dtype=self._dtype, device=device)

    def make_inputs(self, batch: Batch, embedded: torch.Tensor) -> torch.Tensor | None:
        """Further inputs of all layers, `[tokens, layers · size]`; None where they have none. embedded: the residual
        stream before all layers.
        """
        if self._inputs is None:
            return None
        token_ids = batch.token_ids if batch.lora is None else batch.lora.known(batch.token_ids)
        return self._inputs.of(token_ids, embedded, batch.lora, batch.backends)

    @property
    def bias_dtype(self) -> torch.dtype:
        """See `MergeableModel`."""
        return self._dtype

    def merged_form(self, layer: int, group: int) -> tuple[torch.Size, torch.dtype]:
        """See `MergeableModel.merged_form`."""
        origin = self.layers[layer][MERGED_MATRICES[group]]
        if isinstance(origin, RoundingWeight) or (isinstance(origin, NarrowWeight) and origin.rounds_inputs):
            raise CannotMerge(INPUTS_ARE_ROUNDED)
        return origin.shape, origin.dtype

    def merge(
        self,
        layer: int,
        group: int,
        rows: Sequence[AdapterRows],
        origin: torch.Tensor | NarrowWeight,
        out: torch.Tensor,
    ) -> float:
        """See `MergeableModel.merge`."""
        origin = origin.dense() if isinstance(origin, NarrowWeight) else unpack(origin)
        return merge(origin, out, self._arena.pages, layer, parts=rows, modules=self._groups[layer][group])

    def use_merged(self, layers: Sequence[LayerWeights] | None) -> None:
        """Have steps that say so take these layers; None: there are none."""
        self._merged = layers or ()

    def prompt_logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits `[end - begin, vocab]` float32 of some of the last step's prompt-logprob tokens."""
        hidden = self._kept(begin, end)
        logits = multiply(GemmBackend.LIBRARY, hidden, self._lm_head).float()
        if self._prompt_lora is not None:
            self._prompt_lora.add(logits, hidden, self._first_token, begin)
        return self.gathered(self._capped(logits))

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
    def _first_token(self) -> int:
        """Token of this rank's first column of the logits."""
        return 0 if self._ranks is None else self.config.vocab_size * self._ranks.rank // self._ranks.size

    @property
    def logits_width(self) -> int:
        """Columns of the logits that this rank computes."""
        return len(self._lm_head)

    @property
    def ranks(self) -> Collectives | None:
        """The ranks that compute shares with this one; None where it computes all."""
        return self._ranks

    @property
    def dtype(self) -> torch.dtype:
        """What steps compute in."""
        return self._dtype

    def gemms(self, *, every: bool = False) -> dict[GemmKind, list[GemmUse]]:
        """Where the model has GEMMs of each kind: of each product that adapters add to, the first. every: all."""
        found: dict[GemmKind, dict[object, GemmUse]] = {}
        products = self.config.projections.product_in
        for index, op in self._program.gemms():
            weights = self.layers[index]
            kind = kind_of(weights[op.weight], weights.get(op.bias), silu=op.silu)
            use = GemmUse(op.group.name, weights[op.weight], index, op)
            key = index if every else products[index][op.group]
            found.setdefault(kind, {}).setdefault((key, op.group), use)
        apart = [] if self._inputs is None else [("INPUTS", self._inputs.project)]
        apart += [] if self._streams is None else [("STREAMS", weight) for weight in self._streams.weights]
        for at, (name, weight) in enumerate(apart):
            found.setdefault(kind_of(weight), {}).setdefault((at, name) if every else name, GemmUse(name, weight))
        found[kind_of(self._lm_head, is_head=True)] = {Group.HEAD: GemmUse(Group.HEAD.name, self._lm_head)}
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
        computed with it. weights: others than the layer's.
        """
        if use.layer is None or use.op is None:
            return multiply(backend, x, use.weight)
        own = self.layers[use.layer] if weights is None else weights
        kind = kind_of(own[use.op.weight], own.get(use.op.bias), silu=use.op.silu)
        return self._program.run_gemm(use.layer, use.op, x, {kind: backend}, lora, own)


def capped(logits: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Scale and cap logits in place, where the model does."""
    scale, cap = config.logits_scale, config.logits_softcap
    if scale != 1.0:
        logits.mul_(scale)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _kv_scales(weights: Weights, arena: Arena) -> list[KvScales]:
    """Of each layer with KV."""
    return weights.kv_scales() if arena.layout.float8_kv else [UNSCALED] * arena.layout.num_layers


def _rotary(rope: RopeConfig, positions: int, dtype: torch.dtype, device: torch.device) -> RotaryEmbedding:
    return RotaryEmbedding(
        rope.angles(positions),
        positions,
        dtype,
        device,
        factor=rope.attention_factor,
        interleaved=rope.interleaved,
        axes=rope.element_axes,
    )
