"""Greedy tokens of a Llama in few operations: a guess, which spares the reference all steps but one."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu


class LlamaDraft:
    """A model of transformers, with the adapter that peft has active in its matrices. It knows no biases."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.eps, self.frequencies = config.rms_norm_eps, model.model.rotary_emb.inv_freq
        self.embed, self.norm, self.head = (
            module.weight for module in (model.model.embed_tokens, model.model.norm, model.lm_head)
        )
        self.layers = [
            (
                layer.input_layernorm.weight, _matrix(attention.q_proj, attention.k_proj, attention.v_proj),
                _matrix(attention.o_proj), layer.post_attention_layernorm.weight,
                _matrix(mlp.gate_proj, mlp.up_proj), _matrix(mlp.down_proj),
            )
            for layer in model.model.layers for attention, mlp in [(layer.self_attn, layer.mlp)]
        ]  # fmt: skip

    @torch.inference_mode()
    def tokens(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens after `prompt`."""
        cache: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(self.layers)
        drawn: list[int] = []
        for _ in range(count):
            ids = drawn[-1:] or prompt
            first = len(prompt) + len(drawn) - len(ids)
            drawn.append(self._next(ids, first, cache))
        return drawn

    def _next(self, ids: list[int], first: int, cache: list[tuple[torch.Tensor, torch.Tensor] | None]) -> int:
        angles = torch.arange(first, first + len(ids))[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embed[ids]
        for index, (before, qkv, out, behind, gate_up, down) in enumerate(self.layers):
            states = linear(self._normed(x, before), qkv).view(len(ids), sum(self.heads), -1).transpose(0, 1)
            q, k, v = states.split(self.heads)
            q, k = _turned(q, cos, sin), _turned(k, cos, sin)
            if known := cache[index]:
                k, v = torch.cat([known[0], k], 1), torch.cat([known[1], v], 1)
            cache[index] = k, v
            mixed = scaled_dot_product_attention(q, k, v, is_causal=len(ids) > 1, enable_gqa=True)
            x = x + linear(mixed.transpose(0, 1).flatten(1), out)
            gate, up = linear(self._normed(x, behind), gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, down)
        return int((self.head @ self._normed(x[-1], self.norm)).argmax())

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.eps)


def _matrix(*modules: Any) -> torch.Tensor:
    """The matrices of modules one below the other, the active adapter added."""
    found = []
    for module in modules:
        weight = module.weight
        if hasattr(module, "lora_A") and not module.disable_adapters:
            for name in module.active_adapters:
                if name in module.lora_A:
                    weight = weight + module.get_delta_weight(name)
        found.append(weight.detach())
    return torch.cat(found)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
