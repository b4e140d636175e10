"""A Llama-architecture decoder over the arena."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear

from ..memory.arena import Arena
from ..ops.activation import silu_and_mul
from ..ops.attention import PagedAttention
from ..ops.kv_write import write_kv
from ..ops.norm import rms_norm
from ..ops.rope import apply_rope, rotary_table
from .batch import StepBatch
from .model_config import ModelConfig
from .weights import LayerWeights, ModelWeights


class DecoderModel:
    """Pure computation: weights and arena in, logits out; all of a step's state is in its batch."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, arena: Arena, max_model_len: int) -> None:
        self.config = config
        self._weights = weights
        self._arena = arena
        dtype = weights.embed.dtype
        cos, sin = rotary_table(config.inverse_frequencies(), max_model_len)
        self._cos, self._sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]  # [positions, 1, head_dim]

    def new_attention(self) -> PagedAttention:
        config = self.config
        return PagedAttention(config.num_heads, config.num_kv_heads, config.head_dim, self._arena.layout.block_tokens)

    def close(self) -> None:
        """Nothing outlives the object."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Compute the step's tokens and write their KV; logits `[logit_tokens, vocab]` float32."""
        x = embedding(batch.token_ids, self._weights.embed)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(
                rms_norm(x, layer.input_norm, self.config.rms_norm_eps), index, layer, batch, cos, sin
            )
            x = x + self._mlp(rms_norm(x, layer.post_attention_norm, self.config.rms_norm_eps), index, layer, batch)
        if batch.logit_tokens is not None:
            x = x[batch.logit_tokens]
        x = rms_norm(x, self._weights.norm, self.config.rms_norm_eps)
        return linear(x, self._weights.lm_head).float()

    def _attention(
        self, x: torch.Tensor, index: int, layer: LayerWeights, batch: StepBatch, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        config, lora = self.config, batch.lora
        qkv = linear(x, layer.qkv)  # [tokens, q + 2·kv]
        if lora is not None:
            lora.qkv(qkv, x, index)
        q, k, v = qkv.split((config.q_size, config.kv_size, config.kv_size), dim=-1)
        q = apply_rope(q.view(-1, config.num_heads, config.head_dim), cos, sin)
        k = apply_rope(k.view(-1, config.num_kv_heads, config.head_dim), cos, sin)
        k_cache, v_cache = self._arena.kv_layer(index)
        write_kv(k_cache, v_cache, k, v.view(-1, config.num_kv_heads, config.head_dim), batch.page, batch.offset)
        attended = batch.attention.run(q, k_cache, v_cache)  # [tokens, q]
        out = linear(attended, layer.o)
        if lora is not None:
            lora.o(out, attended, index)
        return out

    def _mlp(self, x: torch.Tensor, index: int, layer: LayerWeights, batch: StepBatch) -> torch.Tensor:
        lora = batch.lora
        gate_up = linear(x, layer.gate_up)  # [tokens, 2·ffn]
        if lora is not None:
            lora.gate_up(gate_up, x, index)
        hidden = silu_and_mul(gate_up)
        out = linear(hidden, layer.down)
        if lora is not None:
            lora.down(out, hidden, index)
        return out
