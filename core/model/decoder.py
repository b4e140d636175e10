"""Llama-family decoder over the arena: Llama, Mistral, Qwen2 and Qwen3, by the checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch.nn.functional import embedding

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
from ...ops.products import linear, pack, unpack
from ...ops.ranks import Ranks
from ...ops.sgmv import AdapterRows
from .batch import StepBatch, Way, Ways
from .config import ModelConfig
from .lora_state import ATTN_O, DOWN, GATE_UP, QKV, StepLora, lora_groups
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
        eps, lora = self.config.rms_norm_eps, batch.lora
        self.scored = None
        residual = embedding(batch.token_ids, self._embed).to(self._dtype)
        rotation = self._rotary.at(batch.positions)
        out: torch.Tensor | None = None  # what a block adds to the residual, added by the next norm
        for index, layer in enumerate(self._merged if batch.merged else self.layers):
            with span(f"layer.{index}"):
                if lora is not None:
                    lora.wait(index)
                with span("attn.qkv"):
                    x, residual, qkv = self._normed_product(QKV, out, residual, index, layer, batch.ways, lora)
                out = self._attention(x, qkv, index, layer, batch, rotation)
                with span("mlp"):
                    x, residual, hidden = self._normed_product(GATE_UP, out, residual, index, layer, batch.ways, lora)
                    out = self._down(x, hidden, index, layer, batch.ways[DOWN], lora)
        with span("logits"):
            if (at := batch.score_tokens) is not None:
                self.scored = add_and_norm(None if out is None else out[at], residual[at], self._norm, eps)
            if batch.logit_tokens is not None:
                residual = residual[batch.logit_tokens]
                out = None if out is None else out[batch.logit_tokens]
            x = add_and_norm(out, residual, self._norm, eps)
            scores = self._gathered(multiply(batch.ways[HEAD], x, self._lm_head))
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

    def weight(self, group: int, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of a group of projections of a layer, or of the logits, which have the same in all."""
        return (
            (layer.qkv, layer.qkv_bias), (layer.o, layer.o_bias), (layer.gate_up, layer.gate_up_bias),
            (layer.down, layer.down_bias), (self._lm_head, None),
        )[group]  # fmt: skip

    def run_products(
        self, group: int, way: Way, x: torch.Tensor, residual: torch.Tensor, layers: Sequence[LayerWeights]
    ) -> torch.Tensor:
        """Run the products of one group, or the logits', alone, as a step of the base model does: with the norm before
        them and the activation behind them, where there is one. Returns the last one's.

        x: `[rows, in]`, what the product or the norm before it is of; residual: `[rows, in]`, changed.
        """
        ways: Ways = (way,) * 5
        y = x
        for index, layer in enumerate(layers):
            if group in (QKV, GATE_UP):
                _, residual, y = self._normed_product(group, x, residual, index, layer, ways, None)
            else:
                y = multiply(way, x, *self.weight(group, layer))
        return y

    def _normed_product(
        self,
        group: int,
        out: torch.Tensor | None,
        residual: torch.Tensor,
        index: int,
        layer: LayerWeights,
        ways: Ways,
        lora: StepLora | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Of QKV or GATE_UP: what LoRA multiplies with, the residual with `out` added, and the product; gated where no
        LoRA product comes between.
        """
        norm = layer.input_norm if group == QKV else layer.post_attention_norm
        weight, bias = self.weight(group, layer)
        eps, gate = self.config.rms_norm_eps, group == GATE_UP and lora is None
        if ways[group] is Way.NORMED:
            x, residual, y = norm_and_multiply(out, residual, norm, eps, weight, bias, gate=gate, keep=lora is not None)
            return x, residual, y
        x = add_and_norm(out, residual, norm, eps)
        return x, residual, (multiply_and_gate if gate else multiply)(ways[group], x, weight, bias)

    def _attention(
        self,
        x: torch.Tensor | None,
        qkv: torch.Tensor,
        index: int,
        layer: LayerWeights,
        batch: Batch,
        rotation: Rotation,
    ) -> torch.Tensor:
        """qkv: `[tokens, q + 2·kv]`, the product with x without LoRA's."""
        lora = batch.lora
        k_cache, v_cache = self._arena.kv_layers[index]
        if lora is not None and x is not None:
            with span("lora.qkv"):
                lora.add(QKV, qkv, x, index)
        with span("attn.rope"):
            q = rotate_and_write(qkv, rotation, self._norms[index], k_cache, v_cache, batch.page, batch.offset)
        with span("attn.run"):
            attended = batch.attention.run(q, k_cache, v_cache)  # [tokens, q]
        with span("attn.o"):
            out = multiply(batch.ways[ATTN_O], attended, layer.o, layer.o_bias)
        if lora is not None:
            with span("lora.o"):
                lora.add(ATTN_O, out, attended, index)
        return self._added(out)

    def _down(
        self,
        x: torch.Tensor | None,
        hidden: torch.Tensor,
        index: int,
        layer: LayerWeights,
        way: Way,
        lora: StepLora | None,
    ) -> torch.Tensor:
        """hidden: `[tokens, ffn]`; with LoRA the product with x without LoRA's, `[tokens, 2·ffn]`."""
        if lora is None or x is None:
            return self._added(multiply(way, hidden, layer.down, layer.down_bias))
        with span("lora.gate_up"):
            lora.add(GATE_UP, hidden, x, index)
        hidden = silu_and_mul(hidden)
        out = multiply(way, hidden, layer.down, layer.down_bias)
        with span("lora.down"):
            lora.add(DOWN, out, hidden, index)
        return self._added(out)

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' columns, see `Ranks.gather`."""
        return logits if self._ranks is None else self._ranks.gather(logits, self.config.vocab_size)

    def _added(self, out: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `out`."""
        return out if self._ranks is None else self._ranks.add_up(out)


def multiply(way: Way, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`."""
    if way is Way.LIBRARY:
        return linear(x, weight, bias)
    from ...ops import small_gemm_triton  # needs triton

    return small_gemm_triton.multiply(x, weight, bias)


def multiply_and_gate(
    way: Way, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`silu(gate) · up` of the halves of `x @ weightᵀ + bias`; the same bits as one after the other of the same way."""
    if way is Way.LIBRARY:
        return silu_and_mul(linear(x, weight, bias))
    from ...ops import small_gemm_triton  # needs triton

    return small_gemm_triton.multiply(x, weight, bias, silu=True)


def add_and_norm(out: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `residual`, to which `out`, if there is any, is added in place."""
    return rms_norm(residual, norm, eps) if out is None else add_rms_norm(out, residual, norm, eps)


def norm_and_multiply(
    out: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: bool,
    keep: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`add_and_norm` and the product, gated or not, by one launch of ours.

    Returns the normed rows where they are to be kept, the residual, which is another one where `out` was added, and the
    product.
    """
    from ...ops import small_gemm_triton  # needs triton

    x, before = (residual, None) if out is None else (out, residual)
    return small_gemm_triton.add_norm_multiply(x, before, norm, eps, weight, bias, silu=gate, keep=keep)


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
