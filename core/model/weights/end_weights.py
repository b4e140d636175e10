"""Weights of a model's ends, by the slots that their ops name.

Tests: tests/core/model/program/test_ends.py
"""

from __future__ import annotations

from typing import Any

import torch

from ....memory.pages.projections import Role
from ..checkpoints.quantization.groups import plain
from ..specs.config import ModelConfig
from .kept_weights import moved_norm
from .layer_weights import LayerWeights
from .slot import Keep
from .tensor_parts import end_slots
from .weights import Pack, Weights


def end_weights(
    config: ModelConfig,
    weights: Weights,
    table: torch.Tensor,
    kept: Pack | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    packs: bool,
) -> LayerWeights:
    """Read them. table: `Weights.embed`. kept: see `Weights.layers`. dtype: what steps compute in. packs: the head is
    packed, also where it is tied to the embeddings.
    """
    head, embed = weights.quantised_head(table), table.to(device)
    found: dict[str, Any] = {"embed": embed, "head": embed}
    if packs or head is not table:
        found["head"] = plain(head, table.dtype) if kept is None else kept(head)
    if config.has_last_norm:
        found["norm"] = moved_norm(weights.norm(), config.final_norm, device, dtype)
    if (norm := weights.embedding_norm()) is not None:
        found["embed_norm"] = moved_norm(norm, config.norm, device, dtype)
    if (scales := weights.embed_scales()) is not None:
        found["embed_scales"] = scales.to(device, dtype)
    if (bias := weights.lm_head_bias()) is not None:
        found["head_bias"] = bias.to(device)
    if (positions := weights.position_table()) is not None:
        found["positions"] = positions.to(device)
    if (media := weights.media()) is not None:
        found["media"] = media.to(device, dtype)
    if config.per_layer_embeddings is not None:
        rows, found[Role.PER_LAYER], norm = weights.per_layer_embeddings(kept)
        found |= {"per_layer_table": rows.to(device), "per_layer_norm": moved_norm(norm, config.norm, device, dtype)}
    return found | around_weights(config, weights, kept, device)


def around_weights(config: ModelConfig, weights: Weights, kept: Pack | None, device: torch.device) -> LayerWeights:
    """What layers have before all of them, and behind."""
    whole = {slot.name for slot in end_slots(config) if slot.keep is Keep.WHOLE}
    own = weights.ends(kept).items()
    return {name: value if name in whole else value.to(device) for name, value in own}
