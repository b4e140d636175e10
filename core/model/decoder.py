"""Decoder over the arena, of the layers that a model's configuration describes; see `layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding, linear

from ...memory.pages.arena import Arena
from ...ops.attention import PLAIN, Attention, HeadShape, PagedAttention, Scores
from ...ops.elementwise import (
    HeadNorms,
    RotaryEmbedding,
    Rotation,
    add_rms_norm,
    gelu_and_mul,
    layer_norm,
    rms_norm,
    rotate_and_write,
    silu_and_mul,
)
from ...ops.merge import merge
from ...ops.packed_gemm import pack, packed_linear, unpack
from ...ops.ranks import Collectives
from ...ops.rotation import KvSlots
from ...ops.sgmv import AdapterRows
from .batch import ATTN_O, DOWN, GATE_UP, QKV, GemmBackend, GemmBackends, StepBatch, StepLora, lora_groups
from .config import ModelConfig
from .layers import Activation, AttentionSpec, LayerSpec, Norms, NormSpec
from .nvtx_spans import span
from .rope_config import RopeConfig
from .weights import LayerWeights, Pack, Weights

if TYPE_CHECKING:
    from ...ops.sgmv_triton import Shrunk

#: Index of the logits' GEMM in a step's backends.
HEAD = 4

#: Spans of the groups of projections, with the base weights and with adapters.
_SPANS = {
    QKV: ("attn.qkv", "lora.qkv"), ATTN_O: ("attn.o", "lora.o"), GATE_UP: ("mlp.gate_up", "lora.gate_up"),
    DOWN: ("mlp.down", "lora.down"),
}  # fmt: skip

#: A step's batch in the form that this decoder takes.
Batch = StepBatch[Attention, StepLora]


class Residual:
    """The residual stream. rows: `[tokens, hidden]`. added: `[tokens, hidden]`, which the next norm adds to them."""

    __slots__ = ("added", "norm", "rows")

    def __init__(self, rows: torch.Tensor, norm: NormSpec, added: torch.Tensor | None = None) -> None:
        self.rows, self.norm, self.added = rows, norm, added

    def __getitem__(self, tokens: torch.Tensor) -> Residual:
        """Of some tokens, a copy."""
        return Residual(self.rows[tokens], self.norm, None if self.added is None else self.added[tokens])

    def normed(self, weight: torch.Tensor | None) -> torch.Tensor:
        """The norm of the rows, to which `added` is added in place; without a weight the rows themselves."""
        added, self.added = self.added, None
        if weight is None or self.norm.centered:
            rows = self.rows if added is None else self.rows.add_(added)
            return rows if weight is None else normed(rows, weight, self.norm)
        eps = self.norm.eps
        return rms_norm(self.rows, weight, eps) if added is None else add_rms_norm(added, self.rows, weight, eps)


def normed(x: torch.Tensor, weight: torch.Tensor, norm: NormSpec) -> torch.Tensor:
    """x: `[tokens, hidden]`."""
    return (layer_norm if norm.centered else rms_norm)(x, weight, norm.eps)


class Flow:
    """What goes from piece to piece of a step, in memory that does not move: of `bucket` tokens.

    rows: the residual stream `[tokens, hidden]`. q: `[tokens, heads, head_dim]`, what attention is given. attended:
    of q's shape, what it gives.
    """

    __slots__ = ("attended", "q", "rows")

    def __init__(self, rows: torch.Tensor, q: torch.Tensor, attended: torch.Tensor) -> None:
        self.rows, self.q, self.attended = rows, q, attended

    def of(self, tokens: int) -> Flow:
        """Of the first tokens alone, in the same memory."""
        return Flow(self.rows[:tokens], self.q[:tokens], self.attended[:tokens])


class Layer:
    """A layer's products in one step.

    With norms BEFORE:

        x += o(attention(qkv(x)))
        x += down(gate_up(x))

    qkv and gate_up take the residual stream and begin with its norm; o and down give what is to be added to it.
    """

    __slots__ = ("_backends", "_index", "_lora", "_ranks", "_spec", "_weights")

    def __init__(
        self,
        weights: LayerWeights,
        spec: LayerSpec,
        index: int,
        backends: GemmBackends,
        lora: StepLora | None = None,
        ranks: Collectives | None = None,
    ) -> None:
        """lora: None when no row uses an adapter. ranks: have shares of o's and down's inputs each."""
        self._weights, self._spec, self._index = weights, spec, index
        self._backends, self._lora, self._ranks = backends, lora, ranks

    def begin(self, x: Residual) -> torch.Tensor:
        """Queries, keys and values `[tokens, q + 2·kv]`; a parallel feed-forward part is added to x."""
        if self._spec.norms is not Norms.PARALLEL:
            return self.qkv(x)
        weights = self._weights
        rows = x.normed(weights.attention_norm)
        qkv = self._gemm(QKV, rows, weights.qkv, weights.qkv_bias)
        x.rows.add_(self._output(self.down(self._gate_up(rows)), x.norm, weights.mlp_out_norm))
        return qkv

    def finish(self, x: Residual, attended: torch.Tensor) -> None:
        """Compute what follows attention, whose output `[tokens, q]` is given."""
        weights = self._weights
        x.added = self._output(self.o(attended), x.norm, weights.attention_out_norm)
        if self._spec.norms is not Norms.PARALLEL:
            with span("mlp"):
                x.added = self._output(self.down(self.gate_up(x)), x.norm, weights.mlp_out_norm)

    def qkv(self, x: Residual) -> torch.Tensor:
        """`[tokens, q + 2·kv]`."""
        weights = self._weights
        return self._gemm(QKV, x.normed(weights.attention_norm), weights.qkv, weights.qkv_bias)

    def o(self, attended: torch.Tensor) -> torch.Tensor:
        """attended: `[tokens, q]`."""
        y = self._gemm(ATTN_O, attended, self._weights.o, self._weights.o_bias)
        return y if self._ranks is None else self._ranks.add_up(y)

    def gate_up(self, x: Residual) -> torch.Tensor:
        """`activation(gate) · up`: `[tokens, ffn]`."""
        return self._gate_up(x.normed(self._weights.mlp_norm))

    def _gate_up(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        if self._spec.feed_forward.activation is Activation.SILU:
            return self._gemm(GATE_UP, rows, weights.gate_up, weights.gate_up_bias, gate=True)
        return gelu_and_mul(self._gemm(GATE_UP, rows, weights.gate_up, weights.gate_up_bias))

    def down(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: `[tokens, ffn]`."""
        y = self._gemm(DOWN, hidden, self._weights.down, self._weights.down_bias)
        return y if self._ranks is None else self._ranks.add_up(y)

    def _output(self, y: torch.Tensor, norm: NormSpec, weight: torch.Tensor | None) -> torch.Tensor:
        """What a part adds to the residual stream, from its last product."""
        y = y if weight is None else normed(y, weight, norm)
        factor = self._spec.residual_multiplier
        return y if factor == 1.0 else y * factor

    def _gemm(
        self, group: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: bool = False
    ) -> torch.Tensor:
        """The product with what adapters add, gated or not; in one launch but for shrink where the way has that."""
        backend, lora, shrunk = self._backends[group], self._lora, None
        base_name, lora_name = _SPANS[group]
        if lora is not None:
            lora.offload(group, x, self._index)
            if backend is GemmBackend.EXPANDED:
                with span(lora_name):
                    shrunk = lora.shrink(group, x, self._index)
        is_added = lora is None or shrunk is not None
        with span(base_name):
            y = multiply(backend, x, weight, bias, gate=gate and is_added, shrunk=shrunk)
        if lora is None or shrunk is not None:
            return y
        with span(lora_name):
            lora.add(group, y, x, self._index)
        return silu_and_mul(y) if gate else y


def multiply(
    backend: GemmBackend,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: bool = False,
    shrunk: Shrunk | None = None,
) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`. gate: `silu(gate) · up` of the halves of that, the
    same bits as one after the other of the same way. shrunk: of adapters that are expanded in the product's launch.
    """
    if backend is GemmBackend.LIBRARY:
        y = (packed_linear if weight.is_mkldnn else linear)(x, weight, bias)
        return silu_and_mul(y) if gate else y
    from ...ops import small_gemm_triton  # needs triton

    return small_gemm_triton.multiply(x, weight, bias, silu=gate, shrunk=shrunk)


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
    ) -> None:
        """Read all of `weights`, layer by layer, into the arena's device; requests may have up to `max_model_len`
        tokens.

        dtype: what steps on a CPU compute in. In float32, packed copies of the weights are kept, beside the embeddings
        as they are. None: they compute in the weights' own dtype and layout. ranks: the ranks that compute a layer's
        shares with this one; `config` is of a share. Each has its columns of the logits.
        """
        self.config = config
        self._ranks = ranks
        self._arena = arena
        device = arena.pages.device
        embed = weights.embed()
        head = weights.lm_head(embed)
        packs = dtype == torch.float32
        self._dtype = dtype = dtype or embed.dtype
        self._embed = embed.to(device)
        kept: Pack | None = None
        if packs:
            kept = lambda weight: pack(weight.float())  # noqa: E731
        elif device.type != "cpu":  # on a CPU what was read is kept; a GPU's is read into the same host memory
            kept = lambda weight: weight.to(device)  # noqa: E731
        if head is embed and not packs:
            self._lm_head = self._embed
        else:
            self._lm_head = head if kept is None else kept(head)
        self.layers = [_moved(layer, config.norm, device, dtype) for layer in weights.layers(kept)]
        self._merged: Sequence[LayerWeights] = ()
        self._groups = lora_groups(config)
        self._norm = _moved_norm(weights.norm(), config.norm, device, dtype)
        self._norms = [_head_norms(layer, config.norm) for layer in self.layers]
        self._scores = [scores_of(layer.mixer, max_model_len) for layer in config.layers]
        self._embedding_factor = config.embedding_factor(embed.dtype)
        self.prompt_hidden: torch.Tensor | None = None
        """Normalised states of the last step's prompt-logprob tokens; to be reset before a captured step, which has
        none.
        """
        self._ropes = [layer.mixer.rope for layer in config.layers]
        self._rotary = {
            rope: RotaryEmbedding(
                rope.inverse_frequencies(), max_model_len, dtype, device,
                factor=rope.attention_factor, interleaved=rope.interleaved,
            )
            for rope in dict.fromkeys(self._ropes)
            if rope is not None
        }  # fmt: skip

    def use_arena(self, arena: Arena) -> None:
        """Keep KV in another arena of the same layout and device from now on."""
        self._arena = arena

    def new_attention(self) -> PagedAttention:
        return PagedAttention(self.heads, self._arena.pages.device)

    @property
    def heads(self) -> HeadShape:
        config = self.config
        return HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, self._arena.layout.block_tokens)

    def close(self) -> None:
        """Nothing outlives the object."""

    def forward(self, batch: Batch, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the step's tokens and write their KV. Returns logits `[logit_tokens, vocab]` float32, in `logits` if
        that is given; of several ranks this one's columns, see `gathered`.
        """
        lora = batch.lora
        x = Residual(self._embedded(batch).to(self._dtype), self.config.norm)
        rotations = self._rotations(batch)
        for index in range(len(self.layers)):
            layer = self._layer(index, batch)
            with span(f"layer.{index}"):
                if lora is not None:
                    lora.wait(index)
                q = self._query(layer, x, index, batch, rotations)
                layer.finish(x, self.attend(index, batch.attention, q))
        return self.compute_logits(x, batch, logits)

    def piece(self, index: int, batch: Batch, flow: Flow) -> None:
        """Compute what lies between the attention of layer `index - 1` and that of layer `index`: the rest of the one,
        and the query of the other, with its keys and values written. The first begins with the embedding, the one
        behind the last layer leaves all in the residual stream.

        Pieces 0 … layers, with `attend` between each and the next, and `compute_logits` behind the last, are a
        `forward`.
        """
        x = Residual(flow.rows, self.config.norm)
        if index:
            self._layer(index - 1, batch).finish(x, flow.attended.view(len(flow.rows), -1))
        else:
            x.rows.copy_(self._embedded(batch))
        if index < len(self.layers):
            self._query(self._layer(index, batch), x, index, batch, self._rotations(batch), flow.q)
        elif x.added is not None:
            x.rows.add_(x.added)

    def attend(
        self, index: int, attention: Attention, q: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A layer's attention `[tokens, heads · head_dim]`, in `out` if that is given; see `PagedAttention.run`."""
        with span("attn.run"):
            return attention.run(q, *self._arena.kv_layers[index], out, self._scores[index])

    def new_flow(self, tokens: int) -> Flow:
        """Zeros for pieces of up to so many tokens."""
        config, device = self.config, self._arena.pages.device
        rows = torch.zeros(tokens, config.hidden_size, dtype=self._dtype, device=device)
        heads = torch.zeros(2, tokens, config.num_heads, config.head_dim, dtype=self._dtype, device=device)
        return Flow(rows, *heads.unbind(0))

    def compute_logits(self, x: Residual, batch: Batch, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the batch's tokens from what the last layer gave; see `forward`."""
        self.prompt_hidden = None
        with span("logits"):
            if batch.prompt_logprob_tokens is not None:
                self.prompt_hidden = x[batch.prompt_logprob_tokens].normed(self._norm)
            if batch.logit_tokens is not None:
                x = x[batch.logit_tokens]
            found = multiply(batch.backends[HEAD], x.normed(self._norm), self._lm_head)
            return self._capped(found.float() if logits is None else logits.copy_(found))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap logits in place, where the model does."""
        scale, cap = self.config.logits_scale, self.config.logits_softcap
        if scale != 1.0:
            logits.mul_(scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embedded(self, batch: Batch) -> torch.Tensor:
        """Embeddings `[tokens, hidden]` of a step's tokens."""
        rows = embedding(batch.token_ids, self._embed)
        return rows if self._embedding_factor == 1.0 else rows * self._embedding_factor

    def _rotations(self, batch: Batch) -> dict[RopeConfig | None, Rotation | None]:
        """A step's angles for each rope of the model."""
        return {None: None, **{rope: rotary.at(batch.positions) for rope, rotary in self._rotary.items()}}

    def merge(
        self, layer: int, group: int, rows: Sequence[AdapterRows], origin: torch.Tensor, out: torch.Tensor
    ) -> float:
        """See `MergeableModel.merge`."""
        return merge(unpack(origin), out, self._arena.pages, layer, rows, self._groups[group])

    def use_merged(self, layers: Sequence[LayerWeights] | None) -> None:
        """Have steps that say so take these layers; None: there are none."""
        self._merged = layers or ()

    def prompt_logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits `[end - begin, vocab]` float32 of some of the last step's prompt-logprob tokens."""
        if self.prompt_hidden is None:
            raise RuntimeError("the last step had no prompt-logprob tokens")
        logits = multiply(GemmBackend.LIBRARY, self.prompt_hidden[begin:end], self._lm_head)
        return self.gathered(self._capped(logits.float()))

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' columns, on the first rank; on others no rows."""
        return logits if self._ranks is None else self._ranks.gather(logits, self.config.vocab_size)

    def join(self, ranks: Collectives) -> None:
        """Have these ranks compute the other shares of layers; see `DecoderModel`."""
        self._ranks = ranks

    @property
    def arena(self) -> Arena:
        """Where KV is kept."""
        return self._arena

    @property
    def logits_width(self) -> int:
        """Columns of the logits that this rank computes."""
        return len(self._lm_head)

    @property
    def ranks(self) -> Collectives | None:
        """The ranks that compute shares with this one; None where it computes all."""
        return self._ranks

    def weight(self, group: int) -> torch.Tensor:
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
        with them and the activation behind them, where there are. Returns the last one's.

        x: `[rows, in]`, what the product or the norm before it is of; residual: `[rows, in]`, changed.
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
        return Layer(weights, self.config.layers[index], index, batch.backends, batch.lora, self._ranks)

    def _query(
        self,
        layer: Layer,
        x: Residual,
        index: int,
        batch: Batch,
        rotations: dict[RopeConfig | None, Rotation | None],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A layer's query `[tokens, heads, head_dim]`; its keys and values are written."""
        qkv, rotation = layer.begin(x), rotations[self._ropes[index]]
        with span("attn.rope"):
            slots = KvSlots(*self._arena.kv_layers[index], batch.page, batch.offset)
            return rotate_and_write(qkv, rotation, self._norms[index], slots, out)


def scores_of(mixer: AttentionSpec, max_model_len: int) -> Scores:
    """How a layer's attention makes weights of scores; PLAIN where it does what most models do. A window that no
    request can leave is none.
    """
    scale = None if mixer.scale == mixer.head_dim**-0.5 else mixer.scale
    window = None if mixer.window is None or mixer.window >= max_model_len else mixer.window
    found = Scores(scale, window, mixer.softcap)
    return PLAIN if found == PLAIN else found


def _moved(layer: LayerWeights, norm: NormSpec, device: torch.device, dtype: torch.dtype) -> LayerWeights:
    """The layer, with every part in `dtype` on `device`; the same tensors where they are that."""
    for field in fields(layer):
        part = getattr(layer, field.name)
        if part is not None and not part.is_mkldnn:
            is_norm = field.name.endswith("norm")
            setattr(layer, field.name, _moved_norm(part, norm, device, dtype) if is_norm else part.to(device, dtype))
    return layer


def _moved_norm(weight: torch.Tensor, norm: NormSpec, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(device) if norm.wide else weight.to(device, dtype)


def _head_norms(layer: LayerWeights, norm: NormSpec) -> HeadNorms | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(layer.q_norm, layer.k_norm, norm.eps)
