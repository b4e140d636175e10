"""The ops of indexers in the torch interpreter.

Tests: tests/core/layers/test_indexer.py, tests/core/layers/test_key_blocks.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from ....ops.attention.attention import KeyBlocks, KvCache
from ....ops.attention.key_blocks import halves_of
from ....ops.elementwise.elementwise import Rotation, layer_norm, rotate
from ..nvtx_spans import span
from ..specs.indexer import IndexerSpec, MeanIndexerSpec
from .indexer_ops import Choose, ChooseBlocks, Index, IndexBlocks
from .layer_program import Kept
from .torch_step import OpContext, Run, Step, reader


def index(op: Index, at: OpContext) -> Run:
    spec, model, kv = op.indexer, at.model, at.model.page_index[at.index]
    queries, key_of, factors = reader(op.x), reader(op.key), reader(op.factors)
    q_out, weights_out = Kept(op.q, (spec.heads, spec.key_dim)), Kept(op.weights, (spec.heads,))
    rows_of = None if op.rows is None else reader(op.rows)

    def run(step: Step) -> None:
        names, rotation, norm = step.names, step.rotations[spec.rope], at.weights[op.norm].float()
        with span("attn.index"):
            key = layer_norm(key_of(names), norm[0], spec.eps, norm[1])[:, None]
            cache = model.arena.kv_layers[kv][0][..., -spec.kept_dim :]
            place = step.batch.page[model.page_groups[kv]], step.batch.offset
            kept = _rotated(key, rotation, spec)
            if rows_of is not None and op.gates is not None:
                kept = torch.cat((kept, linear(rows_of(names), at.weights[op.gates])[:, None]), 2)
            cache[place] = kept.to(cache.dtype)
            rows = queries(names).unflatten(1, (spec.heads, spec.key_dim))
            names[op.q] = _rotated(rows, rotation, spec, step.kept.get(q_out))
            weights = step.kept.get(weights_out)
            names[op.weights] = factors(names).clone() if weights is None else weights.copy_(factors(names))

    return run


def _rotated(
    x: torch.Tensor, rotation: Rotation | None, spec: IndexerSpec, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Queries or keys `[tokens, heads, key]`, with those elements first that rotate: no product of them depends on
    their order.
    """
    x = x.roll(spec.rope.dim, -1) if spec.rotates_last and spec.rope is not None else x
    return rotate(x, rotation, None, spec.eps, out)


def choose(op: Choose, at: OpContext) -> Run:
    spec, mixer, model, kv = op.attention.indexer, op.attention, at.model, at.model.page_index[at.index]
    assert spec is not None and mixer.top_k is not None, "the layer has an indexer"
    width, top_k, kept = spec.kept_dim, mixer.top_k_within(model.max_model_len), Kept(op.out, (mixer.top_k,), True)

    def run(step: Step) -> None:
        if top_k is None:
            return  # queries attend to all that they see
        names = step.names
        with span("attn.index"):
            attention, (k, _) = step.batch.attention.of(model.page_groups[kv]), model.arena.kv_layers[kv]
            own, biases = (names[op.q], names[op.weights]), None if op.biases is None else at.weights[op.biases]
            found = attention.choose(*own, k[..., -width:], top_k, step.kept.get(kept), biases)
            names[op.out] = found

    return run


def index_blocks(op: IndexBlocks, at: OpContext) -> Run:
    spec, model, kv, eps = op.indexer, at.model, at.model.kv_index[at.index], op.norm.eps
    queries, key_of, q_out = reader(op.x), reader(op.key), Kept(op.q, (spec.heads, spec.key_dim))
    q_norm, k_norm, head_dim = at.weights[op.q_norm], at.weights[op.k_norm], op.attention.head_dim
    is_plain = isinstance(spec, MeanIndexerSpec)

    def run(step: Step) -> None:
        names, rotation = step.names, step.rotations[spec.rope]
        with span("attn.index"):
            key = key_of(names) if is_plain else rotate(key_of(names)[:, None], rotation, k_norm, eps)[:, 0]
            places = step.batch.page[model.page_groups[kv]], step.batch.offset
            ends = [each[..., head_dim:] for each in model.arena.kv_layers[kv]]
            for end, part in zip(ends, halves_of(key, ends[0].shape[2:].numel()), strict=True):
                end[places] = part.unflatten(1, end.shape[2:]).to(end.dtype)
            rows = queries(names).unflatten(1, (spec.heads, spec.key_dim))
            names[op.q] = rotate(rows, rotation, q_norm, eps, step.kept.get(q_out))

    return run


def choose_blocks(op: ChooseBlocks, at: OpContext) -> Run:
    spec, mixer, model, kv = op.indexer, op.attention, at.model, at.model.kv_index[at.index]
    chooses, head_dim = mixer.top_k_within(model.max_model_len) is not None, mixer.head_dim
    blocks = KeyBlocks(spec.block, spec.top, spec.local)
    k_norm = None if op.k_norm is None else at.weights[op.k_norm]

    def keys_of(means: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        # pages may go on behind the longest sequence: no query sees a block there, and the rope has no position for it
        rotation = model.rotary[spec.rope].at(firsts.clamp(max=model.max_model_len - 1))
        return rotate(means[:, None], rotation, k_norm, op.norm.eps)[:, 0]

    def run(step: Step) -> None:
        if not chooses:
            return  # queries attend to all that they see
        names = step.names
        with span("attn.index"):
            attention = step.batch.attention.of(model.page_groups[kv])
            k, v = (each[..., head_dim:] for each in model.arena.kv_layers[kv])
            if k_norm is None:
                names[op.out] = attention.choose_blocks(names[op.q], KvCache(k, v), blocks)
            else:
                names[op.out] = attention.choose_means(names[op.q], KvCache(k, v), blocks, keys_of)

    return run
