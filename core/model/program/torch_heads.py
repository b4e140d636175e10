"""What attention's ops in the torch interpreter are bound to: norms, factors, scores.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....ops.attention.attention import PLAIN, Scores
from ....ops.elementwise.elementwise import HeadNorms, split_gates, split_gates_per_element, split_gates_per_head
from ..specs.attention import AttentionSpec, HeadNorm, OutputGate
from ..specs.norms import NormSpec
from ..weights.layer_weights import LayerWeights
from .layer_program import Kept
from .torch_step import Bound

#: What splits gates from queries, keys and values.
SPLITS = {
    OutputGate.BESIDE_QUERIES: split_gates,
    OutputGate.PER_ELEMENT: split_gates_per_element,
    OutputGate.PER_HEAD: split_gates_per_head,
}


def attended_of(out: str, mixer: AttentionSpec) -> Kept:
    """The memory of attention's output, where it has any of its own."""
    return Kept(out, (mixer.num_heads, mixer.attended_dim))


def scores_of(mixer: AttentionSpec | None, max_model_len: int) -> Scores:
    """How a layer's attention makes weights of scores; PLAIN where it does as most models, or has no attention. A
    window that no request can leave counts as none.
    """
    if mixer is None:
        return PLAIN
    scale = None if mixer.scale == mixer.head_dim**-0.5 else mixer.scale
    window = None if mixer.chunked else mixer.window_within(max_model_len)  # a chunk is a row of its own
    top_k = mixer.top_k_within(max_model_len)
    sparse = 0 if mixer.block_indexer is None or top_k is None else mixer.block_indexer.block
    found = Scores(
        scale,
        window,
        mixer.softcap,
        mixer.sinks,
        mixer.blocks,
        bool(mixer.slopes),
        top_k,
        sparse,
        has_relative=mixer.relative is not None,
    )
    return PLAIN if found == PLAIN else found


def head_norms(layer: LayerWeights, attention: AttentionSpec, norm: NormSpec, model: Bound) -> HeadNorms | None:
    """The norms of queries and keys; None: there are none."""
    ranks = model.ranks
    if attention.head_norm is HeadNorm.BARE:
        ones = torch.ones(attention.head_dim, device=model.device)
        return HeadNorms(ones, ones, norm.eps)
    q, k = layer.get("q_norm"), layer.get("k_norm")
    if q is None or k is None:
        return None
    if attention.head_norm is not HeadNorm.ALL:
        ranks = None
    if attention.head_norm in (HeadNorm.OWN, HeadNorm.BIASED):
        return HeadNorms(q, k, norm.eps, own=True)
    if attention.head_norm is HeadNorm.ROTATED:
        ones = torch.ones_like(q)
        return HeadNorms(ones, ones, norm.eps)
    return HeadNorms(q, k, norm.eps, ranks, attention.kv_copies)


def log_scaling(mixer: AttentionSpec, model: Bound) -> torch.Tensor | None:
    """Factors of queries by position, `[positions, 1, 1]`, in the dtype in which they multiply; None: none exist."""
    scaling = mixer.log_scaling
    if scaling is None:
        return None
    dtype = model.dtype if scaling.is_rounded else torch.float32
    return scaling.factors(model.max_model_len).to(model.device, dtype)[:, None, None]


def query_weights(layer: LayerWeights, attention: AttentionSpec) -> torch.Tensor | None:
    """What rotated queries are multiplied by, `[head_dim]` float32: see `HeadNorm.ROTATED`."""
    if attention.head_norm is not HeadNorm.ROTATED:
        return None
    return layer["q_norm"].float() * layer["k_norm"].float()


def caches(mixer: AttentionSpec, model: Bound, kv: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Gives the cached keys and values of a layer, without an indexer's keys."""
    if mixer.block_indexer is None:
        return lambda: model.arena.kv_layers[kv]

    def own() -> tuple[torch.Tensor, torch.Tensor]:
        k, v = model.arena.kv_layers[kv]
        return k[..., : mixer.head_dim], v[..., : mixer.head_dim]

    return own
