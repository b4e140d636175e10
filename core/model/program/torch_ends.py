"""The ops of a model's ends in the torch interpreter.

Tests: tests/core/model/program/test_ends.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from ....ops.elementwise.elementwise import rms_norm
from .end_ops import AddPositions, Cap, EmbedMedia, JoinStreams, KeepEmbeddings, NormParts, PlaceImages, SplitStreams
from .layer_program import Kept
from .ops import TakeInput
from .torch_ops import backend_for, multiply
from .torch_step import OpContext, Run, Step

#: The least mean square that a stream is scaled by.
_LEAST_SQUARE = 1e-5


def add_positions(op: AddPositions, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        step.names[op.x] += embedding(step.batch.positions, step.layers[index][op.table])

    return run


def embed_media(op: EmbedMedia, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        table, rows = step.layers[index][op.table], step.names[op.x]
        places = step.batch.token_ids - op.first
        own = embedding(places.clamp(0, len(table) - 1), table)
        step.names[op.out] = torch.where((places >= 0)[:, None], own, rows)

    return run


def place_images(op: PlaceImages, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        if (media := step.batch.media) is not None:
            x = step.names[op.x]
            rows = media.part(0, x.shape[1]).to(x.device, step.layers[index][op.table].dtype)
            x.index_copy_(0, media.places.to(x.device), rows.to(x.dtype))

    return run


def take_input(op: TakeInput, at: OpContext) -> Run:
    index, layers = at.index, at.model.num_layers

    def run(step: Step) -> None:
        inputs = step.names[op.inputs]
        step.names[op.out] = inputs.view(len(inputs), layers, -1)[:, index]

    return run


def norm_parts(op: NormParts, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        x, weight = step.names[op.x], step.layers[index][op.weight]
        step.names[op.out] = rms_norm(x.reshape(-1, len(weight)), weight, op.eps).view(x.shape)

    return run


def keep_embeddings(op: KeepEmbeddings, _: OpContext) -> Run:
    def run(step: Step) -> None:
        x = step.names[op.x]
        memory = step.kept.get(Kept(op.out, (x.shape[1],)))
        step.names[op.out] = x.clone() if memory is None else memory.copy_(x)

    return run


def split_streams(op: SplitStreams, at: OpContext) -> Run:
    index, count = at.index, len(op.weights) + 1

    def run(step: Step) -> None:
        x, weights, backends = step.names[op.x], step.layers[index], step.batch.backends
        memory = step.kept.get(Kept(op.streams, (count, x.shape[1])))
        streams = x.new_empty(len(x), count, x.shape[1]) if memory is None else memory
        streams[:, 0] = x
        for stream, slot in enumerate(op.weights, 1):
            weight = weights[slot]
            streams[:, stream] = _as_large(multiply(backend_for(backends, weight), x, weight), x)
        step.names[op.streams] = streams

    return run


def join_streams(op: JoinStreams, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        weights, backends = step.layers[index], step.batch.backends
        first, *others = (each.contiguous() for each in step.names[op.streams].unbind(1))
        pairs = zip(others, (weights[slot] for slot in op.weights), strict=True)
        products = (multiply(backend_for(backends, weight), each, weight) for each, weight in pairs)
        found = torch.stack([first, *(_as_large(each, first) for each in products)])
        step.names[op.x].copy_(found.mean(0))

    return run


def _as_large(rows: torch.Tensor, as_these: torch.Tensor) -> torch.Tensor:
    """Rows `[tokens, hidden]`, each multiplied so that it has the root mean square of the other."""
    want = as_these.square().mean(-1, keepdim=True) ** 0.5
    return rows * want / rows.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()


def cap(op: Cap, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.x] = capped(step.names[op.x], op)

    return run


def capped(logits: torch.Tensor, op: Cap) -> torch.Tensor:
    """Scale and cap logits in place."""
    if op.scale != 1.0:
        logits.mul_(op.scale)
    return logits if op.cap is None else logits.div_(op.cap).tanh_().mul_(op.cap)
