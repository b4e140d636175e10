"""What llama.cpp's converter makes of tensors that it changes, and what takes them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Json = dict[str, Any]


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The converter's own `LlamaModel.permute`."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `permute`."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


class Converted(NamedTuple):
    """What the converter makes of a tensor."""

    parts: dict[str, torch.Tensor]
    """Names in the file, and values."""

    back: Callable[[list[torch.Tensor]], torch.Tensor] = lambda values: values[0]
    """Makes the tensor of what the file holds of these."""


def without_heads(new: str, weight: torch.Tensor, heads: int) -> Converted:
    """q, k and v, as GPTNeoXModel writes them."""
    parts = weight.view(heads, 3, -1, *weight.shape[1:]).unbind(1)

    def back(found: list[torch.Tensor]) -> torch.Tensor:
        parts = [part.view(heads, -1, *weight.shape[1:]) for part in found[0].chunk(3)]
        return torch.stack(parts, 1).reshape(weight.shape)

    return Converted({new: torch.cat([part.flatten(0, 1) for part in parts])}, back)


def keys_and_values(weight: torch.Tensor, config: Json, at: str) -> Converted:
    """Latents' keys and values, as DeepseekV2Model writes them."""
    heads, key = config["num_attention_heads"], config["qk_nope_head_dim"]
    keys, values = weight.view(heads, -1, weight.shape[1]).split([key, config["v_head_dim"]], dim=1)
    return Converted(
        {f"{at}attn_k_b.weight": keys.transpose(1, 2).contiguous(), f"{at}attn_v_b.weight": values.contiguous()},
        lambda found: torch.cat([found[0].transpose(1, 2), found[1]], 1).reshape(weight.shape),
    )


def by_part(weight: torch.Tensor, config: Json, at: str) -> Converted:
    """Qwen3-Next's q, k, v and z, as Qwen3NextModel writes them."""
    heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    sizes = [key, key, value, value]
    q, k, v, z = (each.flatten(0, 1) for each in weight.view(heads, -1, weight.shape[1]).split(sizes, dim=1))

    def back(found: list[torch.Tensor]) -> torch.Tensor:
        parts = [*found[0].split([heads * each for each in sizes[:3]]), found[1]]
        return torch.cat([each.view(heads, -1, weight.shape[1]) for each in parts], 1).reshape(weight.shape)

    return Converted({f"{at}attn_qkv.weight": torch.cat([q, k, v]), f"{at}attn_gate.weight": z}, back)
