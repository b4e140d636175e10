"""Llama-family decoder over the arena: Llama, Mistral, Qwen2 and Qwen3, by the checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding, linear

from ...memory.pages.arena import Arena
from ...ops.attention import Attention, PagedAttention
from ...ops.elementwise import (
    HeadNorms,
    RotaryEmbedding,
    Rotation,
    add_rms_norm,
    rms_norm,
    rotate_and_write,
    silu_and_mul,
)
from ...ops.merge import merge
from ...ops.packed_gemm import pack, packed_linear, unpack
from ...ops.ranks import Collectives
from ...ops.sgmv import AdapterRows
from .batch import ATTN_O, DOWN, GATE_UP, QKV, GemmBackend, GemmBackends, StepBatch, StepLora, lora_groups
from .config import ModelConfig
from .nvtx_spans import span
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

    __slots__ = ("added", "eps", "rows")

    def __init__(self, rows: torch.Tensor, eps: float, added: torch.Tensor | None = None) -> None:
        self.rows, self.eps, self.added = rows, eps, added

    def __getitem__(self, tokens: torch.Tensor) -> Residual:
        """Of some tokens, a copy."""
        return Residual(self.rows[tokens], self.eps, None if self.added is None else self.added[tokens])

    def normed(self, norm: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the rows, to which `added` is added in place."""
        added, self.added = self.added, None
        return rms_norm(self.rows, norm, self.eps) if added is None else add_rms_norm(added, self.rows, norm, self.eps)


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

        x += o(attention(qkv(x)))
        x += down(gate_up(x))

    qkv and gate_up take the residual stream and begin with its norm; o and down give what is to be added to it.
    """

    __slots__ = ("_backends", "_index", "_lora", "_ranks", "_weights")

    def __init__(
        self,
        weights: LayerWeights,
        index: int,
        backends: GemmBackends,
        lora: StepLora | None = None,
        ranks: Collectives | None = None,
    ) -> None:
        """lora: None when no row uses an adapter. ranks: have shares of o's and down's inputs each."""
        self._weights, self._index, self._backends, self._lora, self._ranks = weights, index, backends, lora, ranks

    def qkv(self, x: Residual) -> torch.Tensor:
        """`[tokens, q + 2·kv]`."""
        weights = self._weights
        return self._gemm(QKV, x.normed(weights.attention_norm), weights.qkv, weights.qkv_bias)

    def o(self, attended: torch.Tensor) -> torch.Tensor:
        """attended: `[tokens, q]`."""
        y = self._gemm(ATTN_O, attended, self._weights.o, self._weights.o_bias)
        return y if self._ranks is None else self._ranks.add_up(y)

    def gate_up(self, x: Residual) -> torch.Tensor:
        """`silu(gate) · up`: `[tokens, ffn]`."""
        weights = self._weights
        normed = x.normed(weights.mlp_norm)
        return self._gemm(GATE_UP, normed, weights.gate_up, weights.gate_up_bias, gate=True)

    def down(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: `[tokens, ffn]`."""
        y = self._gemm(DOWN, hidden, self._weights.down, self._weights.down_bias)
        return y if self._ranks is None else self._ranks.add_up(y)

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


def _finish_layer(layer: Layer, x: Residual, attended: torch.Tensor) -> None:
    """Compute what follows a layer's attention."""
    x.added = layer.o(attended)
    with span("mlp"):
        x.added = layer.down(layer.gate_up(x))


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
        self.layers = [_moved(layer, device, dtype) for layer in weights.layers(kept)]
        self._merged: Sequence[LayerWeights] = ()
        self._groups = lora_groups(config)
        self._norm = weights.norm().to(device, dtype)
        self._norms = [_head_norms(layer, config.rms_norm_eps) for layer in self.layers]
        self.prompt_hidden: torch.Tensor | None = None
        """Normalised states of the last step's prompt-logprob tokens; to be reset before a captured step, which has
        none.
        """
        self._rotary = RotaryEmbedding(config.inverse_frequencies(), max_model_len, dtype, device)

    def use_arena(self, arena: Arena) -> None:
        """Keep KV in another arena of the same layout and device from now on."""
        self._arena = arena

    def new_attention(self) -> PagedAttention:
        config = self.config
        return PagedAttention(
            config.num_heads, config.num_kv_heads, config.head_dim, self._arena.layout.block_tokens,
            self._arena.pages.device,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing outlives the object."""

    def forward(self, batch: Batch, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the step's tokens and write their KV. Returns logits `[logit_tokens, vocab]` float32, in `logits` if
        that is given; of several ranks this one's columns, see `gathered`.
        """
        lora = batch.lora
        x = Residual(embedding(batch.token_ids, self._embed).to(self._dtype), self.config.rms_norm_eps)
        rotation = self._rotary.at(batch.positions)
        for index in range(len(self.layers)):
            layer = self._layer(index, batch)
            with span(f"layer.{index}"):
                if lora is not None:
                    lora.wait(index)
                q = self._query(layer, x, index, batch, rotation)
                _finish_layer(layer, x, self.attend(index, batch.attention, q))
        return self.compute_logits(x, batch, logits)

    def piece(self, index: int, batch: Batch, flow: Flow) -> None:
        """Compute what lies between the attention of layer `index - 1` and that of layer `index`: the rest of the one,
        and the query of the other, with its keys and values written. The first begins with the embedding, the one
        behind the last layer leaves all in the residual stream.

        Pieces 0 … layers, with `attend` between each and the next, and `compute_logits` behind the last, are a
        `forward`.
        """
        x = Residual(flow.rows, self.config.rms_norm_eps)
        if index:
            _finish_layer(self._layer(index - 1, batch), x, flow.attended.view(len(flow.rows), -1))
        else:
            x.rows.copy_(embedding(batch.token_ids, self._embed))
        if index < len(self.layers):
            rotation = self._rotary.at(batch.positions)
            self._query(self._layer(index, batch), x, index, batch, rotation, flow.q)
        elif x.added is not None:
            x.rows.add_(x.added)

    def attend(
        self, index: int, attention: Attention, q: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A layer's attention `[tokens, heads · head_dim]`, in `out` if that is given; see `PagedAttention.run`."""
        with span("attn.run"):
            return attention.run(q, *self._arena.kv_layers[index], out)

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
            prompt_logprobs = multiply(batch.backends[HEAD], x.normed(self._norm), self._lm_head)
            return prompt_logprobs.float() if logits is None else logits.copy_(prompt_logprobs)

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
        return self.gathered(multiply(GemmBackend.LIBRARY, self.prompt_hidden[begin:end], self._lm_head)).float()

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
        y, stream = x, Residual(residual, self.config.rms_norm_eps)
        for index, weights in enumerate(layers):
            layer, stream.added = Layer(weights, index, (backend,) * 4, lora), x
            if group in (QKV, GATE_UP):
                y = (layer.qkv if group == QKV else layer.gate_up)(stream)
            else:
                y = (layer.o if group == ATTN_O else layer.down)(x)
        return y

    def _layer(self, index: int, batch: Batch) -> Layer:
        weights = (self._merged if batch.merged else self.layers)[index]
        return Layer(weights, index, batch.backends, batch.lora, self._ranks)

    def _query(
        self, layer: Layer, x: Residual, index: int, batch: Batch, rotation: Rotation, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A layer's query `[tokens, heads, head_dim]`; its keys and values are written."""
        qkv = layer.qkv(x)
        with span("attn.rope"):
            return rotate_and_write(
                qkv, rotation, self._norms[index], *self._arena.kv_layers[index], batch.page, batch.offset, out
            )


def _moved(layer: LayerWeights, device: torch.device, dtype: torch.dtype) -> LayerWeights:
    """The layer, with every part in `dtype` on `device`; the same tensors where they are that."""
    for field in fields(layer):
        if (part := getattr(layer, field.name)) is not None and not part.is_mkldnn:
            setattr(layer, field.name, part.to(device, dtype))
    return layer


def _head_norms(layer: LayerWeights, eps: float) -> HeadNorms | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(layer.q_norm, layer.k_norm, eps)
