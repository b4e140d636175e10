"""Llama-family decoder over the arena: Llama, Mistral, Qwen2 and Qwen3, by the checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch.nn.functional import embedding

from ...memory.pages.arena import Arena
from ...ops.attention import Attention, PagedAttention
from ...ops.elementwise import HeadNorms, RotaryEmbedding, Rotation, rotate_and_write
from ...ops.merge import merge
from ...ops.products import linear, pack, unpack
from ...ops.ranks import Ranks
from ...ops.sgmv import AdapterRows
from .batch import StepBatch, Way
from .config import ModelConfig
from .layer import Layer, Residual, multiply
from .lora_state import GATE_UP, QKV, StepLora, lora_groups
from .nvtx_spans import span
from .weights import LayerWeights, Pack, Weights

#: Place of the logits' product among a step's ways.
HEAD = 4

#: A step's batch in the form that this decoder takes.
Batch = StepBatch[Attention, StepLora]


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
        ranks: Ranks | None = None,
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
        self.scored: torch.Tensor | None = None
        """Normalised states of the last step's score tokens; to be reset before a captured step, which has none."""
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
        that is given; of another rank than the first no rows.
        """
        lora, ranks = batch.lora, self._ranks
        self.scored = None
        x = Residual(embedding(batch.token_ids, self._embed).to(self._dtype), self.config.rms_norm_eps)
        rotation = self._rotary.at(batch.positions)
        for index, weights in enumerate(self._merged if batch.merged else self.layers):
            layer = Layer(weights, index, batch.ways, lora, ranks)
            with span(f"layer.{index}"):
                if lora is not None:
                    lora.wait(index)
                x.added = layer.o(self._attended(layer.qkv(x), index, batch, rotation))
                with span("mlp"):
                    x.added = layer.down(layer.gate_up(x))
        with span("logits"):
            if batch.score_tokens is not None:
                self.scored = x[batch.score_tokens].normed(self._norm)
            if batch.logit_tokens is not None:
                x = x[batch.logit_tokens]
            scores = self._gathered(multiply(batch.ways[HEAD], x.normed(self._norm), self._lm_head))
            return scores.float() if logits is None else logits.copy_(scores)

    def merge(
        self, layer: int, group: int, rows: Sequence[AdapterRows], origin: torch.Tensor, out: torch.Tensor
    ) -> float:
        """See `MergeableModel.merge`."""
        return merge(unpack(origin), out, self._arena.pages, layer, rows, self._groups[group])

    def use_merged(self, layers: Sequence[LayerWeights] | None) -> None:
        """Have steps that say so take these layers; None: there are none."""
        self._merged = layers or ()

    def score_logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits `[end - begin, vocab]` float32 of some of the last step's score tokens."""
        if self.scored is None:
            raise RuntimeError("the last step had no score tokens")
        return self._gathered(linear(self.scored[begin:end], self._lm_head)).float()

    def weight(self, group: int) -> torch.Tensor:
        """The first layer's weight of a group of projections, or the logits', which all layers share."""
        layer = self.layers[0]
        return (layer.qkv, layer.o, layer.gate_up, layer.down, self._lm_head)[group]

    def run_products(
        self, group: int, way: Way, x: torch.Tensor, residual: torch.Tensor, layers: Sequence[LayerWeights]
    ) -> torch.Tensor:
        """Run the products of one group, or the logits', alone, as a step of the base model does: with the norm before
        them and the activation behind them, where there is one. Returns the last one's.

        x: `[rows, in]`, what the product or the norm before it is of; residual: `[rows, in]`, changed.
        """
        if group == HEAD:
            return multiply(way, x, self._lm_head)
        y, stream = x, Residual(residual, self.config.rms_norm_eps)
        for index, weights in enumerate(layers):
            layer, stream.added = Layer(weights, index, (way,) * 4), x
            product = (layer.qkv, layer.o, layer.gate_up, layer.down)[group]
            y = product(stream if group in (QKV, GATE_UP) else x)
        return y

    def _attended(self, qkv: torch.Tensor, index: int, batch: Batch, rotation: Rotation) -> torch.Tensor:
        """Attention `[tokens, q]` of a layer's `[tokens, q + 2·kv]`, whose keys and values are written."""
        k_cache, v_cache = self._arena.kv_layers[index]
        with span("attn.rope"):
            q = rotate_and_write(qkv, rotation, self._norms[index], k_cache, v_cache, batch.page, batch.offset)
        with span("attn.run"):
            return batch.attention.run(q, k_cache, v_cache)

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' columns, see `Ranks.gather`."""
        return logits if self._ranks is None else self._ranks.gather(logits, self.config.vocab_size)


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
