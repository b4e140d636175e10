"""Turns what a model's configuration says of its ends into ops.

Tests: tests/core/model/program/test_ends.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....memory.pages.projections import Role
from ..specs.config import ModelConfig
from ..weights.slot import Keep
from .layer_program import Kept
from .op import PER_LAYER, STREAM, Op
from .ops.embed import AddPositions, Embed, EmbedMedia, PlaceImages, ScaleEmbeddings
from .ops.linear import Gemm
from .ops.logits import Cap, Logits, Rows, Select
from .ops.norm import Norm, NormParts
from .ops.rows import Concat, Scale, Sum

#: Buffers behind all layers: normalised states `[rows, hidden]`, and logits `[rows, vocab]`.
STATES, LOGITS = "n", "logits"


@dataclass(frozen=True, slots=True)
class EndPrograms:
    """The ops of a model's ends, in the parts that steps run apart."""

    embed: tuple[Op, ...]
    """They leave the residual stream's beginning."""

    per_layer: tuple[Op, ...]
    """They make per-layer embeddings; none where layers have none."""

    split: tuple[Op, ...]
    """They make several streams of the residual stream, or keep it as it is before all layers."""

    join: tuple[Op, ...]
    """They make one of them, behind all layers."""

    kept: tuple[Op, ...]
    """They make final states of tokens whose states are kept."""

    states: tuple[Op, ...]
    """They make final states of tokens with logits."""

    logits: tuple[Op, ...]
    """They make logits of final states."""

    lasting: tuple[Kept, ...]
    """Buffers besides the residual stream that outlive layers."""

    @property
    def before(self) -> tuple[Op, ...]:
        """All before the layers, in order."""
        return self.embed + self.per_layer + self.split

    @property
    def behind(self) -> tuple[Op, ...]:
        """All behind the layers, for tokens with logits."""
        return self.join + self.states + self.logits


def end_programs(config: ModelConfig) -> EndPrograms:
    """The programs of a model's ends. config: of the model, or of a TP rank's share."""
    final = Norm(STREAM, STATES, "norm", config.final_norm) if config.has_last_norm else Concat((STREAM,), STATES)
    return EndPrograms(
        embed=tuple(_embed(config)),
        per_layer=tuple(_per_layer(config)),
        split=config.split.ops,
        join=config.join.ops,
        kept=(Select((STREAM,), Rows.KEPT), final),
        states=(Select((STREAM,), Rows.LOGITS), final),
        logits=tuple(_logits(config)),
        lasting=tuple(_lasting(config)),
    )


def _lasting(config: ModelConfig) -> dict[Kept, None]:
    """What is written before all layers, and what these leave to later ones."""
    found = [*config.split.program.lasting]
    if (spec := config.per_layer_embeddings) is not None:
        found.append(Kept(PER_LAYER, (config.num_layers * spec.size,)))
    for program in config.programs:
        found += program.lasting
    return dict.fromkeys(found)


def end_gemms(config: ModelConfig) -> list[tuple[str, str]]:
    """The slots of matrices of the ends but the head's, and the name of each one's kind."""
    per_layer: list[tuple[str, str]] = []
    if config.per_layer_embeddings is not None:
        per_layer.append((Role.PER_LAYER, Role.PER_LAYER))
    own = (slot for end in (config.split, config.join) for slot in end.slots)
    return per_layer + [(slot.name, "streams") for slot in own if slot.keep is Keep.WHOLE]


def _embed(config: ModelConfig) -> list[Op]:
    found: list[Op] = [Embed(STREAM, "embed", config.embedding_multiplier, adapted=True)]
    if config.position_table is not None:
        found.append(AddPositions(STREAM))
    if config.media:
        found.append(EmbedMedia(STREAM, STREAM, config.media[0].first))
    if config.embedding_norm:
        found.append(Norm(STREAM, STREAM, "embed_norm", config.norm))
    if config.scales_embeddings:
        found.append(ScaleEmbeddings(STREAM))
    return found if config.vision is None else [*found, PlaceImages(STREAM, "embed")]


def _per_layer(config: ModelConfig) -> list[Op]:
    """`(norm(project(embedding) · hidden^-0.5) + row · size^0.5) · 2^-0.5`, of all layers at once."""
    if (spec := config.per_layer_embeddings) is None:
        return []
    beyond = spec.vocab if spec.first_for_others else None
    return [
        Embed("rows", "per_layer_table", spec.size**0.5, first_from=beyond),
        Gemm(STREAM, PER_LAYER, Role.PER_LAYER),
        Scale(PER_LAYER, PER_LAYER, config.hidden_size**-0.5),
        NormParts(PER_LAYER, PER_LAYER, "per_layer_norm", config.norm.eps),
        Sum(PER_LAYER, "rows", PER_LAYER),
        Scale(PER_LAYER, PER_LAYER, 2**-0.5),
    ]


def _logits(config: ModelConfig) -> list[Op]:
    found: list[Op] = [Logits(STATES, LOGITS, config.vocab_size, bias="head_bias" if config.head_bias else None)]
    cap = cap_of(config)
    return found if cap == Cap(LOGITS) else [*found, cap]


def logits_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a GPU keeps a step's logits: that of the head's product, unless something is computed on them
    afterwards, in float32. dtype: the model's.
    """
    return torch.float32 if config.head_bias or cap_of(config) != Cap(LOGITS) else dtype


def cap_of(config: ModelConfig) -> Cap:
    """What becomes of logits at last; tokens that adapters add, too, get it."""
    return Cap(LOGITS, config.logits_scale, config.logits_softcap)
