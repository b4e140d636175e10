"""Says what each op of a model's ends computes with, for people.

Tests: tests/core/model/program/test_text.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..specs.config import ModelConfig
from .end_ops import (
    AddPositions,
    Cap,
    Embed,
    EmbedMedia,
    JoinStreams,
    KeepEmbeddings,
    Logits,
    NormParts,
    PlaceImages,
    Select,
    SplitStreams,
)
from .hyper_ops import ConnectStreams, CopyToStreams
from .ops import Gemm, Norm, Op, Scale


def end_detail(op: Op, config: ModelConfig) -> str:
    """Shapes of weights, kinds and numbers."""
    say = _DETAILS.get(type(op))
    return "" if say is None else say(op, config)


def _embed(op: Embed, config: ModelConfig) -> str:
    if not op.adapted:
        return f"{config.num_layers} vectors of a token, times {op.factor:g}: {op.table}"
    factor = "" if op.factor == 1.0 else f", times {op.factor:g}"
    return f"{config.vocab_size:,} tokens → {config.hidden_size}{factor}: embed_tokens"


def _logits(op: Logits, config: ModelConfig) -> str:
    table = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    return f"{config.hidden_size} → {op.vocab:,}{', with a bias' * bool(op.bias)}: {table}"


def _cap(op: Cap, _: ModelConfig) -> str:
    scale = "" if op.scale == 1.0 else f"times {op.scale:g}"
    cap = "" if op.cap is None else f"soft cap {op.cap:g}"
    return ", ".join(each for each in (scale, cap) if each)


def _positions(_: AddPositions, config: ModelConfig) -> str:
    table = config.position_table
    assert table is not None, "the op is of a model with a table"
    return f"{table.rows:,} positions → {config.hidden_size}: {'sinusoids' if table.is_made else 'learned'}"


def connections(op: ConnectStreams) -> str:
    """How numbers of streams are made; also in layers."""
    mixed = "" if op.mix is None else f", mixed by {op.hyper.rounds} rounds of Sinkhorn-Knopp"
    return f"numbers of {op.hyper.count} streams, eps {op.hyper.eps:g}{mixed}: {op.weight}"


_DETAILS: dict[type[Op], Callable[[Any, ModelConfig], str]] = {
    AddPositions: _positions,
    Cap: _cap,
    ConnectStreams: lambda op, _: connections(op),
    CopyToStreams: lambda op, _: f"{op.count} streams, all of them x",
    Embed: _embed,
    EmbedMedia: lambda op, _: f"tokens of images and sound, from {op.first:,} on: {op.table}",
    Gemm: lambda op, config: f"{config.hidden_size} → further inputs of all layers: {op.weight}",
    JoinStreams: lambda op, _: f"their mean: {', '.join(op.weights)}",
    KeepEmbeddings: lambda _, __: "as they are, for layers that read them again",
    Logits: _logits,
    Norm: lambda op, _: f"{op.norm.kind}, eps {op.norm.eps:g}: {op.weight}",
    NormParts: lambda op, _: f"each layer's part, eps {op.eps:g}: {op.weight}",
    PlaceImages: lambda _, __: "rows that the vision tower made, in their tokens' places",
    Scale: lambda op, _: f"{op.factor:g}",
    Select: lambda _, __: "rows of tokens that have logits",
    SplitStreams: lambda op, _: f"{len(op.weights) + 1} streams: {', '.join(op.weights)}",
}
