"""Decoder over the arena, of the layers that a model's configuration describes; see `layers`.

Tests: tests/core/paths, tests/core/test_parity.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from ...memory.pages.arena import Arena
from ...ops.attention import PLAIN, GroupedAttention, HeadShape, PagedAttention, Scores
from ...ops.elementwise import (
    HeadNorms,
    RotaryEmbedding,
    Rotation,
    gate_output,
    rotate,
    rotate_and_write,
    split_gates,
    split_gates_apart,
    split_gates_of_heads,
    with_normed_values,
)
from ...ops.float8_kv import UNSCALED, KvScales
from ...ops.latent_attention import LatentAttention
from ...ops.merge import merge
from ...ops.narrow_weights import NarrowWeight
from ...ops.packed_gemm import unpack
from ...ops.ranks import Collectives
from ...ops.rotation import KvSlots
from ...ops.sgmv import AdapterRows
from ..requests.types import CannotMerge
from .batch import GemmBackend, StepBatch, StepStates
from .config import ModelConfig
from .experts import ExpertKernels
from .kept_weights import keeps_experts, keeps_projections, kept_head, moved, moved_norm
from .layer import HEAD, Layer, Residual, multiply, normed
from .layer_inputs import LayerInputs
from .layer_weights import MERGED_MATRICES, LayerWeights
from .layers import AttentionSpec, HeadNorm, NormSpec, OutputGate
from .lora_state import lora_groups
from .nvtx_spans import span
from .paged_states import PagedStates
from .rope_config import RopeConfig
from .rounding_weight import RoundingWeight
from .shadow import INPUTS_ARE_ROUNDED
from .step_lora import ATTN_O, GATE_UP, QKV, HeadLora, StepLora
from .streams import streams_of
from .weights import Pack, Weights

#: A step's batch in the form that this decoder takes.
Batch = StepBatch[GroupedAttention, StepLora]


@dataclass(slots=True)
class Flow:
    """Tensors that one piece of a step hands to the next, in memory that does not move: of `bucket` tokens."""

    rows: torch.Tensor
    """The residual stream `[tokens, hidden]`."""

    streams: torch.Tensor
    """`[tokens, streams · hidden]`: what layers have in its place where the residual is several streams, no columns
    where it is one.
    """

    inputs: torch.Tensor
    """`[tokens, layers · size]`: further inputs of layers; no columns where they have none."""

    q: tuple[torch.Tensor, ...]
    """`[tokens, heads, head_dim]`: the queries, for each of `ModelConfig.attention_shapes`."""

    attended: tuple[torch.Tensor, ...]
    """The output of attention `[tokens, heads, …]`, likewise."""

    gates: torch.Tensor
    """`[tokens, heads · head_dim]`: of attention's output; no columns where it has none."""

    recurrent_in: torch.Tensor
    """`[tokens, in]`: the input of a recurrent mixer; no columns if no layer has one."""

    recurrent_out: torch.Tensor
    """`[tokens, out]`: its output."""

    def of(self, tokens: int) -> Flow:
        """Of the first tokens alone, in the same memory."""
        q, attended = (tuple(each[:tokens] for each in shapes) for shapes in (self.q, self.attended))
        return Flow(
            rows=self.rows[:tokens],
            streams=self.streams[:tokens],
            inputs=self.inputs[:tokens],
            q=q,
            attended=attended,
            gates=self.gates[:tokens],
            recurrent_in=self.recurrent_in[:tokens],
            recurrent_out=self.recurrent_out[:tokens],
        )


_SPLITS = {
    OutputGate.BESIDE_QUERIES: split_gates,
    OutputGate.APART: split_gates_apart,
    OutputGate.OF_HEADS: split_gates_of_heads,
}


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
        tokens. Projections stay narrow if `weights.keeps` any.

        dtype: what steps on a CPU compute in. In float32, packed copies of the weights are kept, next to the embeddings
        as they are. None: they compute in the weights' own dtype and layout. ranks: the ranks that compute a layer's
        shares with this one; `config` is of a share. Each has its columns of the logits.
        """
        self.config = config
        self._ranks = ranks
        self._arena = arena
        self._page_groups = arena.layout.group_of_layer
        self._kv_index = kv_index(config)
        self._kv_scales = _kv_scales(weights, arena)
        device = arena.pages.device
        embed = weights.embed()
        head = weights.kept_lm_head(embed)
        packs = dtype == torch.float32
        self._dtype = dtype = dtype or embed.dtype
        self._embed = embed.to(device)
        stay_narrow = weights.keeps is not None
        kept = keeps_projections(weights, device, embed.dtype, packs=packs)
        self._lm_head = self._embed if head is embed and not packs else kept_head(head, embed.dtype, kept)
        self._head_bias = None if (bias := weights.lm_head_bias()) is None else bias.to(device)
        pack_expert, keep_experts = keeps_experts(expert_kernels, dtype, device, stay_narrow=stay_narrow)
        read = weights.layers(kept, pack_expert)
        self.layers = [moved(layer, config.norm, device, dtype, keep_experts) for layer in read]
        self._merged: Sequence[LayerWeights] = ()
        self._groups = lora_groups(config.projections)
        self._norm = moved_norm(weights.norm(), config.norm, device, dtype)
        self._inputs = self._layer_inputs(weights, kept, device)
        self._streams = streams_of(config, weights, kept)
        self._media = None if (media := weights.media()) is None else media.to(device, dtype)
        self._norms = self._head_norms()
        self._attention, self._recurrent = zip(
            *((layer.attention, layer.recurrent) for layer in config.layers), strict=True
        )
        self._mixes = [layer.mixer is not None for layer in config.layers]
        self._forms = attention_forms(config)
        self._ones = _ones(config, device)
        self._scores = [scores_of(layer.attention, max_model_len) for layer in config.layers]
        self._embedding_factor = config.embedding_factor(embed.dtype)
        self.kept_states: torch.Tensor | None = None
        """Normalised states of the last step's kept tokens; to be reset before a captured step, which has none."""
        self._logit_states: torch.Tensor | None = None
        self._prompt_lora: HeadLora | None = None
        self._ropes = [layer.rope for layer in config.layers]
        ropes = [rope for rope in dict.fromkeys(self._ropes) if rope is not None]
        self._rotary = {rope: _rotary(rope, max_model_len, dtype, device) for rope in ropes}
        self._query_weights = [
            _query_weights(layer, spec.attention) for layer, spec in zip(self.layers, config.layers, strict=True)
        ]
        self._query_factors = _query_factors(self._attention, max_model_len, device, dtype)

    def use_arena(self, arena: Arena) -> None:
        """Keep KV in another arena of the same layout and device from now on."""
        self._arena = arena

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
        x = Residual(self._embedded(batch).to(self._dtype), self.config.norm)
        self.run_layers(x, batch)
        return self.compute_logits(x, batch, logits)

    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        """Write the embeddings of a step's tokens to out `[tokens, hidden]`, which `run_layers` takes."""
        out.copy_(self._embedded(batch))

    def run_layers(self, x: Residual, batch: Batch, inputs: torch.Tensor | None = None) -> None:
        """Compute all layers, from the embeddings in x to what `compute_logits` takes. inputs: of `make_inputs`; None:
        they are made here.
        """
        lora, rotations = batch.lora, self._rotations(batch)
        inputs = self.make_inputs(batch, x.rows) if inputs is None else inputs
        residual = x if self._streams is None else self._streams.split(x, self._streams.within(x))
        for index in range(len(self.layers)):
            layer = self._layer(index, batch)
            with span(f"layer.{index}"):
                if lora is not None:
                    lora.wait(index)
                mixed, beside = self._mixed(layer, residual, index, batch, rotations)
                layer.finish(residual, mixed, self._inputs_of(inputs, index), beside)
        if self._streams is not None:
            self._streams.join(residual, x)

    def _mixed(
        self, layer: Layer, x: Residual, index: int, batch: Batch, rotations: dict[RopeConfig | None, Rotation | None]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run a layer's mixers. Returns the output of its mixer and, where it has attention and a recurrent mixer, of
        the latter as well, both `[tokens, out]`. None stands for a mixer that it does not have.
        """
        if not self._mixes[index]:
            return None, None
        inputs, beside = layer.begin(x)
        if self._attention[index] is None:
            return self._mix(index, inputs, batch.states), None
        q, gates = self._query(layer, inputs, index, batch, rotations)
        attended = self.attend(index, batch.attention, q, layer=layer)
        mixed = None if beside is None else self._mix(index, beside, batch.states)
        return attended if gates is None else gate_output(attended, gates), mixed

    def piece(self, index: int, batch: Batch, flow: Flow) -> None:
        """Compute the part between the mixer of layer `index - 1` and that of layer `index`: the rest of the one, and
        the input of the other, with its keys and values written. The first begins with the embedding, the one after
        the last layer leaves all in the residual stream.

        Pieces 0 … layers, with `mix` between each and the next, and `compute_logits` after the last, are a `forward`.
        """
        rows = Residual(flow.rows, self.config.norm)
        x = rows if self._streams is None else self._streams.within(rows, flow.streams)
        if index:
            inputs = None if self._inputs is None else flow.inputs
            layer = self._layer(index - 1, batch)
            mixed, beside = self._mixed_flow(index - 1, flow)
            layer.finish(x, mixed, self._inputs_of(inputs, index - 1), beside)
        else:
            self.embed(batch, flow.rows)
            if (inputs := self.make_inputs(batch, flow.rows)) is not None:
                flow.inputs.copy_(inputs)
            if self._streams is not None:
                self._streams.split(rows, x)
        if index < len(self.layers) and self._mixes[index]:
            self._begin(index, batch, flow, x)
        elif x.added is not None:
            x.normed(None)
        if index == len(self.layers) and self._streams is not None:
            self._streams.join(x, rows)

    def _begin(self, index: int, batch: Batch, flow: Flow, x: Residual) -> None:
        """Leave in `flow` what a layer's mixers read."""
        layer = self._layer(index, batch)
        inputs, beside = layer.begin(x)
        if self._recurrent[index] is not None:
            flow.recurrent_in.copy_(inputs if beside is None else beside)
        if self._attention[index] is None:
            return
        _, gates = self._query(layer, inputs, index, batch, self._rotations(batch), flow.q[self._forms[index]])
        if gates is not None:
            flow.gates.copy_(gates)

    def _mixed_flow(self, index: int, flow: Flow) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What `mix` left in `flow`, as `_mixed` returns it."""
        if not self._mixes[index]:
            return None, None
        if (mixer := self._attention[index]) is None:
            return flow.recurrent_out, None
        attended = flow.attended[self._forms[index]].view(len(flow.rows), -1)
        attended = attended if mixer.output_gate is None else gate_output(attended, flow.gates)
        return attended, None if self._recurrent[index] is None else flow.recurrent_out

    def mix(self, index: int, batch: Batch, states: StepStates | None, flow: Flow) -> None:
        """Run a layer's mixers, as many as it has, between two pieces."""
        if self._recurrent[index] is not None:
            flow.recurrent_out.copy_(self._mix(index, flow.recurrent_in, states))
        if self._attention[index] is not None:
            form = self._forms[index]
            self.attend(index, batch.attention, flow.q[form], flow.attended[form], self._layer(index, batch))

    def _mix(self, index: int, inputs: torch.Tensor, states: StepStates | None) -> torch.Tensor:
        """A layer's recurrent mixer `[tokens, out]`; the sequences' states are updated."""
        weights, spec = self.layers[index].recurrent, self._recurrent[index]
        if states is None or weights is None or spec is None:
            raise RuntimeError(f"layer {index} has a recurrent mixer, and the step has no states for it")
        with span("recurrent.run"):
            return states.mix(index, inputs, weights, self._ranks)

    def attend(
        self,
        index: int,
        attention: GroupedAttention,
        q: torch.Tensor,
        out: torch.Tensor | None = None,
        layer: Layer | None = None,
    ) -> torch.Tensor:
        """A layer's attention `[tokens, heads · head_dim]`, in `out` if that is given; see `PagedAttention.run`. layer:
        one with latents is needed.
        """
        with span("attn.run"):
            kv, mixer, scores = self._kv_index[index], self._attention[index], self._scores[index]
            of_group, (k, v) = attention.of(self._page_groups[kv]), self._arena.kv_layers[kv]
            if mixer is not None and mixer.latent is not None:
                assert layer is not None, "latents need the layer's weights"
                return of_group.run_latents(q, k, layer.latent_heads(mixer.latent), out, scores)
            return of_group.run(q, k, v, out, scores, sinks=self.layers[index].sinks, kv_scales=self._kv_scales[kv])

    def new_rows(self, tokens: int) -> torch.Tensor:
        """Zeros `[tokens, hidden]` for a residual stream."""
        return torch.zeros(tokens, self.config.hidden_size, dtype=self._dtype, device=self._arena.pages.device)

    def new_flow(self, tokens: int) -> Flow:
        """Zeros for pieces of up to so many tokens."""
        config = self.config
        recurrent, shapes = config.recurrent, config.attention_shapes

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(tokens, *shape, dtype=self._dtype, device=self._arena.pages.device)

        return Flow(
            rows=zeros(config.hidden_size),
            streams=zeros(0 if self._streams is None else self._streams.width),
            inputs=self.new_inputs(tokens),
            q=tuple(zeros(it.num_heads, it.query_dim) for it in shapes),
            attended=tuple(zeros(it.num_heads, it.attended_dim) for it in shapes),
            gates=zeros(max(it.gate_size for it in shapes)),
            recurrent_in=zeros(recurrent.in_size if recurrent else 0),
            recurrent_out=zeros(recurrent.out_size if recurrent else 0),
        )

    def compute_logits(self, x: Residual, batch: Batch, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the batch's tokens from the last layer's output; see `forward`."""
        self.kept_states, lora = None, batch.lora
        with span("logits"):
            if batch.kept_tokens is not None:
                self.kept_states = x[batch.kept_tokens].normed(self._norm)
                self._prompt_lora = None if lora is None else lora.prompt_logits()
            if batch.logit_tokens is not None:
                x = x[batch.logit_tokens]
            self._logit_states = normed = x.normed(self._norm)
            found = multiply(batch.backends[HEAD], normed, self._lm_head)
            found = found.float() if logits is None else logits.copy_(found)
            if lora is not None and (head := lora.logits()) is not None:
                head.add(found, normed, self._first_token)
            return self._capped(found)

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
        return normed(rows.to(self._dtype), self._norm, self.config.norm) if self.config.embedding_norm else rows

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
        return self._inputs.of(token_ids, embedded, batch.lora)

    def _inputs_of(self, inputs: torch.Tensor | None, index: int) -> torch.Tensor | None:
        """A layer's share of `make_inputs`."""
        return None if inputs is None else inputs.view(len(inputs), len(self.layers), -1)[:, index]

    def _rotations(self, batch: Batch) -> dict[RopeConfig | None, Rotation | None]:
        """A step's angles for each rope of the model."""
        return {None: None, **{rope: rotary.at(batch.positions) for rope, rotary in self._rotary.items()}}

    @property
    def bias_dtype(self) -> torch.dtype:
        """See `MergeableModel`."""
        return self._dtype

    def merged_form(self, layer: int, group: int) -> tuple[torch.Size, torch.dtype]:
        """See `MergeableModel.merged_form`."""
        origin = getattr(self.layers[layer], MERGED_MATRICES[group])
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
        self._ranks = ranks
        self._norms = self._head_norms()

    def _head_norms(self) -> list[HeadNorms | None]:
        return [
            _head_norms(layer, spec.attention, self.config.norm, self._ranks, self._arena.pages.device)
            for layer, spec in zip(self.layers, self.config.layers, strict=True)
        ]

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

    def weight(self, group: int) -> torch.Tensor | NarrowWeight:
        """The first layer's weight of a group of projections, or the logits', which all layers share."""
        layer = self.layers[0]
        return (layer.qkv, layer.o, layer.gate_up, layer.down, self._lm_head)[group]

    def run_gemms(
        self,
        group: int,
        backend: GemmBackend,
        x: torch.Tensor,
        residual: torch.Tensor,
        layers: Sequence[LayerWeights],
        lora: StepLora | None = None,
    ) -> torch.Tensor:
        """Run the products of one group, or the logits', alone, as a step does: with the norm before them, adapters
        with them and the activation after them, where there are. Returns the last one's.

        x: `[rows, in]`, the input of the product or of the norm before it; residual: `[rows, in]`, changed.
        """
        if group == HEAD:
            return multiply(backend, x, self._lm_head)
        y, stream = x, Residual(residual, self.config.norm)
        for index, weights in enumerate(layers):
            layer, stream.added = Layer(weights, self.config.layers[index], index, (backend,) * 4, lora), x
            if group in (QKV, GATE_UP):
                y = (layer.qkv if group == QKV else layer.gate_up)(stream)
            else:
                y = (layer.o if group == ATTN_O else layer.down)(x)
        return y

    def _layer(self, index: int, batch: Batch) -> Layer:
        weights = (self._merged if batch.merged else self.layers)[index]
        spec, of = self.config.layers[index], Layer if self._streams is None else self._streams.layer
        return of(weights, spec, index, batch.backends, lora=batch.lora, ranks=self._ranks)

    def _query(
        self,
        layer: Layer,
        qkv: torch.Tensor,
        index: int,
        batch: Batch,
        rotations: dict[RopeConfig | None, Rotation | None],
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's query `[tokens, heads, head_dim]`, in `out` if that is given, and the gates of its output, where
        there are any; its keys and values are written.
        """
        attention, gates = self._attention[index], None
        assert attention is not None, "the layer has attention"
        with span("attn.rope"):
            if attention.value_norm and not attention.shares_kv:
                ones, eps = self._ones[attention.head_dim], self.config.norm.eps
                qkv = with_normed_values(qkv, attention.kv_size, ones, eps, keys_are_values=attention.keys_are_values)
            if attention.shares_kv:
                heads = qkv.view(-1, attention.num_heads, attention.head_dim)
                norm = self.layers[index].q_norm
                return rotate(heads, rotations[self._ropes[index]], norm, self.config.norm.eps, out), gates
            kv = self._kv_index[index]
            place = batch.page[self._page_groups[kv]], batch.offset
            slots = KvSlots(*self._arena.kv_layers[kv], *place, self._kv_scales[kv])
            rotation = rotations[self._ropes[index]]
            if attention.output_gate is not None:
                qkv, gates = _SPLITS[attention.output_gate](qkv, attention.num_heads, attention.head_dim)
            if attention.latent is None:
                q = rotate_and_write(qkv, rotation, self._norms[index], slots, out)
            else:
                q = layer.latents(qkv, attention.latent, rotation, slots, out)
            if (weights := self._query_weights[index]) is not None:
                q.mul_(weights)
            if (factors := self._query_factors[index]) is not None:
                q.mul_(factors[batch.positions])
            return q, gates


def capped(logits: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Scale and cap logits in place, where the model does."""
    scale, cap = config.logits_scale, config.logits_softcap
    if scale != 1.0:
        logits.mul_(scale)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def kv_index(config: ModelConfig) -> list[int]:
    """For each layer the place of its KV among the layers with KV of their own; of others that of the one before."""
    found, count, last = [], 0, {}
    for mixer in (layer.attention for layer in config.layers):
        if mixer is not None and not mixer.shares_kv:
            last[mixer.form] = count
            count += 1
        found.append(count - 1 if mixer is None else last[mixer.form])
    return found


def attention_forms(config: ModelConfig) -> list[int]:
    """For each layer the place of its attention's shape among `attention_shapes`; 0 where it has none."""
    forms = [mixer.form for mixer in config.attention_shapes]
    return [0 if layer.attention is None else forms.index(layer.attention.form) for layer in config.layers]


def _ones(config: ModelConfig, device: torch.device) -> dict[int, torch.Tensor]:
    """Weights of norms of values, which have none, by the size of a head."""
    normed = (mixer.head_dim for mixer in config.attention_shapes if mixer.value_norm)
    return {head_dim: torch.ones(head_dim, device=device) for head_dim in normed}


def _kv_scales(weights: Weights, arena: Arena) -> list[KvScales]:
    """Of each layer with KV."""
    return weights.kv_scales() if arena.layout.float8_kv else [UNSCALED] * arena.layout.num_layers


def _rotary(rope: RopeConfig, positions: int, dtype: torch.dtype, device: torch.device) -> RotaryEmbedding:
    frequencies = rope.angles(positions)
    factor, interleaved = rope.attention_factor, rope.interleaved
    return RotaryEmbedding(frequencies, positions, dtype, device, factor=factor, interleaved=interleaved)


def scores_of(mixer: AttentionSpec | None, max_model_len: int) -> Scores:
    """How a layer's attention makes weights of scores; PLAIN where it does as most models, or has no attention. A
    window that no request can leave counts as none.
    """
    if mixer is None:
        return PLAIN
    scale = None if mixer.scale == mixer.head_dim**-0.5 else mixer.scale
    window = None if mixer.chunked else mixer.window_within(max_model_len)  # a chunk is a row of its own
    found = Scores(scale, window, mixer.softcap, mixer.sinks)
    return PLAIN if found == PLAIN else found


def _head_norms(
    layer: LayerWeights,
    attention: AttentionSpec | None,
    norm: NormSpec,
    ranks: Collectives | None,
    device: torch.device,
) -> HeadNorms | None:
    if attention is not None and attention.head_norm is HeadNorm.BARE:
        ones = torch.ones(attention.head_dim, device=device)
        return HeadNorms(ones, ones, norm.eps)
    if attention is None or attention.latent is not None or layer.q_norm is None or layer.k_norm is None:
        return None
    if attention.head_norm is not HeadNorm.ALL:
        ranks = None
    if attention.head_norm is HeadNorm.OWN:
        return HeadNorms(layer.q_norm, layer.k_norm, norm.eps, own=True)
    if attention.head_norm is HeadNorm.ROTATED:
        ones = torch.ones_like(layer.q_norm)
        return HeadNorms(ones, ones, norm.eps)
    return HeadNorms(layer.q_norm, layer.k_norm, norm.eps, ranks, attention.kv_copies)


def _query_factors(
    mixers: Sequence[AttentionSpec | None], positions: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor | None]:
    """For each layer the factors of queries by position, `[positions, 1, 1]`; None where they don't grow."""
    growths = [None if mixer is None else mixer.query_growth for mixer in mixers]
    found = {
        growth: growth.factors(positions).to(device, dtype)[:, None, None]
        for growth in dict.fromkeys(growths)
        if growth is not None
    }
    return [None if growth is None else found[growth] for growth in growths]


def _query_weights(layer: LayerWeights, attention: AttentionSpec | None) -> torch.Tensor | None:
    """What rotated queries are multiplied by, `[head_dim]` float32: see `HeadNorm.ROTATED`."""
    if attention is None or attention.head_norm is not HeadNorm.ROTATED:
        return None
    assert layer.q_norm is not None and layer.k_norm is not None, "the weights are of the spec"
    return layer.q_norm.float() * layer.k_norm.float()
