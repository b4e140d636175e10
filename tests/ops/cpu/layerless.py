"""A native model without layers."""

from __future__ import annotations

from typing import Any

import torch

from chorus.ops.library import native_model
from chorus.ops.library.native_program import Register


def layerless_model(head: torch.Tensor, embed: torch.Tensor | None = None, **changes: Any) -> native_model.NativeModel:
    """Its logits are the products of `head` [vocab, hidden] with the normalised row of `embed` of a token.

    `changes` replace fields of the model.
    """
    vocab, hidden = head.shape
    if embed is None:
        embed = torch.zeros(2, hidden, dtype=head.dtype)
    fields: dict[str, Any] = {
        "hidden": hidden,
        "vocab": vocab,
        "block_tokens": 4,
        "eps": 1e-6,
        "embed": embed,
        "lm_head": native_model.pack(head),
        "norm": torch.ones(hidden),
        "num_layers": 0,
        "ops": [],
        "registers": [Register("Float", hidden)],
        "gemm_shapes": [],
        "gemm_shape_of": [],
        "positions": 1,
        "arena": torch.zeros(2, 64, dtype=head.dtype),
    }
    return native_model.NativeModel(**fields | changes)
