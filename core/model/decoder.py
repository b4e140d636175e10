"""Llama-family decoder over the arena: Llama, Mistral, Qwen2 and Qwen3, by the checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

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
from ...ops.sgmv import AdapterRows
from .batch import StepBatch
from .config import ModelConfig
from .lora_state import ATTN_O, DOWN, GATE_UP, QKV, StepLora, lora_groups
from .nvtx_spans import span
from .weights import LayerWeights, Weights

#: A step's batch in the form that this decoder takes.
Batch = StepBatch[Attention, StepLora]


class DecoderModel:
    """Pure computation: weights and arena in, logits out; all of a step's state is in its batch.

    It computes where the arena is: on a CPU with torch, on a GPU with cuBLAS and the fused kernels of `ops`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, arena: Arena, max_model_len: int) -> None:
        """Read all of `weights`, layer by layer, into the arena's device; requests may have up to `max_model_len`
        tokens.
        """
        self.config = config
        self._arena = arena
        device = arena.pages.device
        embed = weights.embed()
        head = weights.lm_head(embed)
        self._embed = embed.to(device)
        self._lm_head = self._embed if head is embed else head.to(device)
        # on a CPU what was read is kept; for a GPU every projection is read into the same host memory
        pack = None if device.type == "cpu" else lambda weight: weight.to(device)
        self.layers = [_moved(layer, device) for layer in weights.layers(pack)]
        self._merged: Sequence[LayerWeights] = ()
        self._groups = lora_groups(config)
        self._norm = weights.norm().to(device)
        self._norms = [_head_norms(layer, config.rms_norm_eps) for layer in self.layers]
        self._scored: torch.Tensor | None = None  # normalised states of the last step's score tokens
        self._rotary = RotaryEmbedding(config.inverse_frequencies(), max_model_len, self._embed.dtype, device)

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
        that is given.
        """
        eps, lora = self.config.rms_norm_eps, batch.lora
        self._scored = None
        residual = embedding(batch.token_ids, self._embed)
        rotation = self._rotary.at(batch.positions)
        out: torch.Tensor | None = None  # what a block adds to the residual, added by the next norm
        for index, layer in enumerate(self._merged if batch.merged else self.layers):
            with span(f"layer.{index}"):
                if lora is not None:
                    lora.wait(index)
                x = _added_and_normed(out, residual, layer.input_norm, eps)
                out = self._attention(x, index, layer, batch, rotation)
                x = add_rms_norm(out, residual, layer.post_attention_norm, eps)
                out = self._mlp(x, index, layer, batch)
        with span("logits"):
            if (at := batch.score_tokens) is not None:
                self._scored = _added_and_normed(None if out is None else out[at], residual[at], self._norm, eps)
            if batch.logit_tokens is not None:
                residual = residual[batch.logit_tokens]
                out = None if out is None else out[batch.logit_tokens]
            x = _added_and_normed(out, residual, self._norm, eps)
            scores = linear(x, self._lm_head)
            return scores.float() if logits is None else logits.copy_(scores)

    def merge(
        self, layer: int, group: int, rows: Sequence[AdapterRows], origin: torch.Tensor, out: torch.Tensor
    ) -> float:
        """See `MergeableModel.merge`."""
        return merge(origin, out, self._arena.pages, layer, rows, self._groups[group])

    def use_merged(self, layers: Sequence[LayerWeights] | None) -> None:
        """Have steps that say so take these layers; None: there are none."""
        self._merged = layers or ()

    def score_logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits `[end - begin, vocab]` float32 of some of the last step's score tokens."""
        if self._scored is None:
            raise RuntimeError("the last step had no score tokens")
        return linear(self._scored[begin:end], self._lm_head).float()

    def _attention(
        self,
        x: torch.Tensor,
        index: int,
        layer: LayerWeights,
        batch: Batch,
        rotation: Rotation,
    ) -> torch.Tensor:
        lora = batch.lora
        k_cache, v_cache = self._arena.kv_layers[index]
        with span("attn.qkv"):
            qkv = linear(x, layer.qkv, layer.qkv_bias)  # [tokens, q + 2·kv]
        if lora is not None:
            with span("lora.qkv"):
                lora.add(QKV, qkv, x, index)
        with span("attn.rope"):
            q = rotate_and_write(qkv, rotation, self._norms[index], k_cache, v_cache, batch.page, batch.offset)
        with span("attn.run"):
            attended = batch.attention.run(q, k_cache, v_cache)  # [tokens, q]
        with span("attn.o"):
            out = linear(attended, layer.o, layer.o_bias)
        if lora is not None:
            with span("lora.o"):
                lora.add(ATTN_O, out, attended, index)
        return out

    def _mlp(self, x: torch.Tensor, index: int, layer: LayerWeights, batch: Batch) -> torch.Tensor:
        lora = batch.lora
        with span("mlp"):
            gate_up = linear(x, layer.gate_up, layer.gate_up_bias)  # [tokens, 2·ffn]
            if lora is not None:
                with span("lora.gate_up"):
                    lora.add(GATE_UP, gate_up, x, index)
            hidden = silu_and_mul(gate_up)
            out = linear(hidden, layer.down, layer.down_bias)
            if lora is not None:
                with span("lora.down"):
                    lora.add(DOWN, out, hidden, index)
        return out


def _added_and_normed(
    out: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return rms_norm(residual, weight, eps) if out is None else add_rms_norm(out, residual, weight, eps)


def _moved(layer: LayerWeights, device: torch.device) -> LayerWeights:
    """The layer, with every part moved to `device`; the same tensors where they are there."""
    for field in fields(layer):
        if (part := getattr(layer, field.name)) is not None:
            setattr(layer, field.name, part.to(device))
    return layer


def _head_norms(layer: LayerWeights, eps: float) -> HeadNorms | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(layer.q_norm, layer.k_norm, eps)
