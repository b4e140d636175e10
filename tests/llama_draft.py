"""Greedy tokens of a Llama in few operations: a guess, which spares the reference all steps but one."""

from __future__ import annotations

from typing import Any

import numpy as np


class LlamaDraft:
    """A model of transformers, with the adapter that peft has active in its matrices. It knows no biases.

    In NumPy, whose operations on a single row take a tenth of the time of torch's.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps, self.frequencies = config.rms_norm_eps, model.model.rotary_emb.inv_freq.numpy()
        self.embed, self.norm, self.head = map(_matrix, (model.model.embed_tokens, model.model.norm, model.lm_head))
        self.layers = [
            (
                _matrix(layer.input_layernorm),
                _matrix(attention.q_proj, attention.k_proj, attention.v_proj).T,
                _matrix(attention.o_proj).T,
                _matrix(layer.post_attention_layernorm),
                _matrix(mlp.gate_proj, mlp.up_proj).T,
                _matrix(mlp.down_proj).T,
            )
            for layer in model.model.layers
            for attention, mlp in [(layer.self_attn, layer.mlp)]
        ]

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens after `prompt`."""
        dim, room = 2 * len(self.frequencies), len(prompt) + count
        cache = [np.empty((2, self.kv_heads, room, dim), np.float32) for _ in self.layers]
        drawn: list[int] = []
        for _ in range(count):
            ids = drawn[-1:] or prompt
            drawn.append(self._next(ids, len(prompt) + len(drawn) - len(ids), cache))
        return drawn

    def _next(self, ids: list[int], first: int, cache: list[np.ndarray]) -> int:
        tokens, end = len(ids), first + len(ids)
        angles = np.outer(np.arange(first, end, dtype=np.float32), self.frequencies)[:, None]
        cos, sin, half = np.cos(angles), np.sin(angles), len(self.frequencies)
        x = self.embed[ids]
        for (before, qkv, out, behind, gate_up, down), kept in zip(self.layers, cache, strict=True):
            states = (self._normed(x, before) @ qkv).reshape(tokens, -1, 2 * half)
            a, b = np.split(turned := states[:, : -self.kv_heads], 2, -1)
            turned[:] = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            kept[:, :, first:end] = states[:, self.heads :].reshape(tokens, 2, self.kv_heads, -1).transpose(1, 2, 0, 3)
            q = states[:, : self.heads].reshape(tokens, self.kv_heads, -1, 2 * half).transpose(1, 2, 0, 3)
            scores = q @ kept[0, :, None, :end].swapaxes(-1, -2) / np.float32(2 * half) ** 0.5
            if tokens > 1:
                scores += np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (scores / scores.sum(-1, keepdims=True)) @ kept[1, :, None, :end]
            x = x + mixed.transpose(2, 0, 1, 3).reshape(tokens, -1) @ out
            gate, up = np.split(self._normed(x, behind) @ gate_up, 2, -1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ down
        return int((self.head @ self._normed(x[-1], self.norm)).argmax())

    def _normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight


def _matrix(*modules: Any) -> np.ndarray:
    """The weights of modules one below the other, the active adapter added."""
    found = []
    for module in modules:
        weight = module.weight
        if hasattr(module, "lora_A") and not module.disable_adapters:
            for name in module.active_adapters:
                if name in module.lora_A:
                    weight = weight + module.get_delta_weight(name)
        found.append(weight.detach().float().numpy())
    return np.concatenate(found)
