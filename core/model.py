"""A decoder of the Llama kind over the arena: Llama, Mistral, Qwen2 and Qwen3 by what their configuration says."""

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
from .weights import LayerWeights, WeightLoader


class DecoderModel:
    """Pure computation: weights and arena in, logits out; all of a step's state is in its batch."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, arena: Arena, max_model_len: int) -> None:
        """Read all of `weights`; requests may have up to `max_model_len` tokens."""
        self.config = config
        self._arena = arena
        self._embed = weights.embed()
        self._layers = list(weights.layers())
        self._norm = weights.norm()
        self._lm_head = weights.lm_head(self._embed)
        dtype = self._embed.dtype
        cos, sin = rotary_table(config.inverse_frequencies(), max_model_len)
        self._cos, self._sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]  # [positions, 1, head_dim]

    def new_attention(self) -> PagedAttention:
        config = self.config
        return PagedAttention(config.num_heads, config.num_kv_heads, config.head_dim, self._arena.layout.block_tokens)

    def close(self) -> None:
        """Nothing outlives the object."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Compute the step's tokens and write their KV; logits `[logit_tokens, vocab]` float32."""
        x = embedding(batch.token_ids, self._embed)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._layers):
            if batch.lora is not None:
                batch.lora.wait(index)
            x = x + self._attention(
                rms_norm(x, layer.input_norm, self.config.rms_norm_eps), index, layer, batch, cos, sin
            )
            x = x + self._mlp(rms_norm(x, layer.post_attention_norm, self.config.rms_norm_eps), index, layer, batch)
        if batch.logit_tokens is not None:
            x = x[batch.logit_tokens]
        x = rms_norm(x, self._norm, self.config.rms_norm_eps)
        return linear(x, self._lm_head).float()

    def _attention(
        self, x: torch.Tensor, index: int, layer: LayerWeights, batch: StepBatch, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        config, lora = self.config, batch.lora
        qkv = linear(x, layer.qkv, layer.qkv_bias)  # [tokens, q + 2·kv]
        if lora is not None:
            lora.qkv(qkv, x, index)
        q, k, v = qkv.split((config.q_size, config.kv_size, config.kv_size), dim=-1)
        q, k = q.view(-1, config.num_heads, config.head_dim), k.view(-1, config.num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k_cache, v_cache = self._arena.kv_layer(index)
        write_kv(k_cache, v_cache, k, v.view(-1, config.num_kv_heads, config.head_dim), batch.page, batch.offset)
        attended = batch.attention.run(q, k_cache, v_cache)  # [tokens, q]
        out = linear(attended, layer.o, layer.o_bias)
        if lora is not None:
            lora.o(out, attended, index)
        return out

    def _mlp(self, x: torch.Tensor, index: int, layer: LayerWeights, batch: StepBatch) -> torch.Tensor:
        lora = batch.lora
        gate_up = linear(x, layer.gate_up, layer.gate_up_bias)  # [tokens, 2·ffn]
        if lora is not None:
            lora.gate_up(gate_up, x, index)
        hidden = silu_and_mul(gate_up)
        out = linear(hidden, layer.down, layer.down_bias)
        if lora is not None:
            lora.down(out, hidden, index)
        return out
