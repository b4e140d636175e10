"""Latent attention's ops in the torch interpreter.

Tests: tests/core/layers/test_latents.py
"""

from __future__ import annotations

import torch

from ....ops.attention.latents import LatentHeads
from ....ops.elementwise.elementwise import rotate, write_latents
from ....ops.elementwise.rotation import KvSlots, NewLatents
from ..nvtx_spans import span
from .layer_program import Kept
from .ops import LatentAttend, Latents
from .torch_heads import attended_of, query_growth, scores_of
from .torch_step import OpContext, Run, Step, reader


def latents(op: Latents, at: OpContext) -> Run:
    if op.kept is None:
        return _queries(op)
    mixer, spec, queries, kept_of = op.attention, op.latent, reader(op.x), reader(op.kept)
    kv, model, growth = at.model.kv_index[at.index], at.model, query_growth(op.attention, at.model)
    q_out = Kept(op.q, (mixer.num_heads, mixer.query_dim))

    def run(step: Step) -> None:
        names = step.names
        with span("attn.rope"):
            new = NewLatents(kept_of(names), spec.kv_rank, at.weights[op.k_norm], spec.eps)
            rows = queries(names).unflatten(1, (-1, spec.key_dim + spec.rotated_dim))
            place = step.batch.page[model.page_groups[kv]], step.batch.offset
            k, v = model.arena.kv_layers[kv]
            slots = KvSlots(k[..., : mixer.head_dim], v, *place, model.kv_scales[kv])
            q = write_latents(rows, new, step.rotations[mixer.rope], slots, step.kept.get(q_out))
            if growth is not None:
                q.mul_(growth[step.batch.positions])
            names[op.q] = q

    return run


def _queries(op: Latents) -> Run:
    """Rotates queries of a layer that reads another one's latents."""
    mixer, spec, queries = op.attention, op.latent, reader(op.x)
    q_out = Kept(op.q, (mixer.num_heads, mixer.query_dim))

    def run(step: Step) -> None:
        with span("attn.rope"):
            rows = queries(step.names).unflatten(1, (-1, spec.key_dim + spec.rotated_dim))
            own, turned = rows.split((spec.key_dim, spec.rotated_dim), 2)
            turned = rotate(turned, step.rotations[mixer.rope], None, spec.eps)
            step.names[op.q] = torch.cat((own, turned), 2, out=step.kept.get(q_out))

    return run


def latent_attend(op: LatentAttend, at: OpContext) -> Run:
    scores, index, model = scores_of(op.attention, at.model.max_model_len), at.index, at.model
    spec, kv, kept, head_dim = op.latent, model.kv_index[index], attended_of(op), op.attention.head_dim

    def run(step: Step) -> None:
        weights, lora = step.layers[index], step.batch.lora
        absorbed, kv_up = None if lora is None else lora.absorbed(index), weights[op.kv_up]
        num_heads = len(kv_up) // (spec.key_dim + spec.value_dim)
        with span("attn.run"):
            of_group, (k, _) = step.batch.attention.of(model.page_groups[kv]), model.arena.kv_layers[kv]
            bias = weights.get(op.bias)
            assert op.sinks is None or bias is None, "beside sinks, weights don't add up to one: see `latents`"
            ways = LatentHeads(kv_up, num_heads, spec.key_dim, spec.rotated_dim, absorbed, bias)
            q, cache, out = step.names[op.q], k[..., :head_dim], step.kept.get(kept)
            chosen = None if scores.top_k is None or op.chosen is None else step.names[op.chosen]
            sinks = None if op.sinks is None else at.weights[op.sinks]
            step.names[op.out] = of_group.run_latents(q, cache, ways, out, scores, chosen, sinks)

    return run
