"""Gemma 3n, also as the text part of its models of images and sound: a residual of several streams.

Tests: tests/core/layers/test_streams.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...config_json import ConfigJson
from ...specs.attention import HeadNorm
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import GatedSpec
from ...specs.layers import MediaTokens, PerLayerEmbeddingSpec
from ...specs.norms import Norms
from ...specs.tensor_names import AROUND_NORMS, BESIDE_VISION, TensorNames
from .. import gemma_3, reading, rotary
from ..defaults import SHAPE, Defaults
from ..gemma_4 import family as gemma_4
from ..reading import FULL
from .layer import AltUpSpec, Gemma3nLayer

#: Layers that are sparse, and how much, where no field says so.
_SPARSE_LAYERS, _SPARSITY = 10, 0.95


def _read(fields: ConfigJson, tensors: TensorNames) -> ModelConfig:
    types = reading.layer_types(fields, 5)
    first_shared, windows = gemma_4.first_shared_layer(fields, types), reading.windows_of(fields, types)
    ropes = rotary.ropes_by_type(fields, gemma_3.THETAS)
    streams = _streams(fields)
    attention = rotary.attention(fields, rope=None, scale=1.0, head_norm=HeadNorm.EACH, value_norm=True)
    per_layer = PerLayerEmbeddingSpec(
        fields.integer("hidden_size_per_layer_input"),
        fields.integer("vocab_size_per_layer_input"),
        first_for_others=True,
    )
    layers = [
        Gemma3nLayer(
            replace(
                attention,
                rope=ropes[seen],
                window=window,
                shares_kv=index >= first_shared,
                form="full" if seen == FULL else "",
            ),
            feed_forward,
            Norms.AROUND,
            per_layer_size=per_layer.size,
            altup=streams,
            sparsity=sparsity,
        )
        for index, (seen, window, (feed_forward, sparsity)) in enumerate(
            zip(types, windows, _feed_forwards(fields), strict=True)
        )
    ]
    return gemma_4.model_of(fields, layers, per_layer, tensors, first_shared)


def _read_text(fields: ConfigJson) -> ModelConfig:
    """The text part beside modules that embed tokens of images and sound."""
    return replace(_read(fields, _TENSORS), media=_media(fields, ConfigJson.read(fields.path)))


def _media(text: ConfigJson, whole: ConfigJson) -> tuple[MediaTokens, ...]:
    """Each module embeds tokens up to the next one's first."""
    found, end = [], text.integer("vocab_size")
    for field, (module, defaults) in _MEDIA.items():
        tower = (whole.object(field) or whole.part(field, {})).with_defaults(defaults)
        first, rows = tower.integer("vocab_offset"), tower.integer("vocab_size")
        if end - first > rows:
            raise tower.refuse("vocab_size", f"tokens {first} to {end - 1} need rows")
        if end > first:
            eps = tower.number("rms_norm_eps")
            found.insert(0, MediaTokens(module, first, end - first, rows, tower.integer("hidden_size"), eps))
            end = first
    return tuple(found)


def _streams(fields: ConfigJson) -> AltUpSpec:
    count, active = fields.integer("altup_num_inputs"), fields.integer("altup_active_idx", least=0)
    if active >= count:
        raise fields.refuse("altup_active_idx", f"it must be below altup_num_inputs, {count}")
    return AltUpSpec(count, active, fields.integer("laurel_rank"), fields.boolean("altup_correct_scale"))


def _feed_forwards(fields: ConfigJson) -> list[tuple[GatedSpec, float]]:
    """Of each layer, with `Gemma3nLayer.sparsity`; those of another width than the first one's are of another form."""
    count, sizes = fields.integer("num_hidden_layers"), _of_layers(fields, "intermediate_size")
    if sizes is None:
        sizes = [fields.integer("intermediate_size")] * count
    if any(size < 1 or int(size) != size for size in sizes):
        raise fields.refuse("intermediate_size", "whole numbers of at least 1 are needed")
    shares = _of_layers(fields, "activation_sparsity_pattern")
    if shares is None:
        sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
        shares = [_SPARSITY] * sparse + [0.0] * (count - sparse)
    if any(share >= 1 for share in shares):
        raise fields.refuse("activation_sparsity_pattern", "shares below 1 are needed")
    gated = reading.gated(fields.with_values({"intermediate_size": int(sizes[0])}), "hidden_activation")
    return [
        (replace(gated, size=int(size), form="" if size == sizes[0] else f"{int(size)} wide"), max(share, 0.0))
        for size, share in zip(sizes, shares, strict=True)
    ]


def _of_layers(fields: ConfigJson, name: str) -> Sequence[float] | None:
    """The field's numbers, one for each layer; None if it is not a list."""
    if not isinstance(fields.raw.get(name), list):
        return None
    found, count = fields.numbers(name), fields.integer("num_hidden_layers")
    if len(found) != count:
        raise fields.refuse(name, f"{len(found)} numbers for num_hidden_layers, {count}")
    return found


#: Modules that embed tokens, the last ones first: their names, and fields' defaults.
_MEDIA = {
    "audio_config": (
        "embed_audio",
        {"vocab_offset": 262272, "vocab_size": 128, "hidden_size": 1536, "rms_norm_eps": 1e-6},
    ),
    "vision_config": (
        "embed_vision",
        {"vocab_offset": 262144, "vocab_size": 128, "hidden_size": 2048, "rms_norm_eps": 1e-6},
    ),
}

_NAMES = {**AROUND_NORMS, "input_norm": "post_per_layer_input_norm"}
_PLAIN = TensorNames(names=_NAMES)
#: What embeds images and sound, rather than their tokens, is left out.
_TENSORS = replace(
    BESIDE_VISION,
    names=_NAMES,
    prefixes=("model.language_model.", "language_model."),
    left_out=tuple(
        f"{outer}{part}."
        for outer in ("model.", "")
        for part in (
            "vision_tower",
            "audio_tower",
            "embed_vision.soft_embedding_norm",
            "embed_audio.soft_embedding_norm",
        )
    ),
)
_NOTES = 'no adapters on `altup` matrices: train with `exclude_modules=".*altup.*"`'

GEMMA_3N = Family(
    "Gemma 3n",
    ("Gemma3nForCausalLM",),
    partial(_read, tensors=_PLAIN),
    Defaults("Gemma3nTextConfig", takes=SHAPE),
    _PLAIN,
    _NOTES,
)
GEMMA_3N_TEXT = Family(
    "Gemma 3n (text)",
    ("Gemma3nForConditionalGeneration",),
    _read_text,
    Defaults("Gemma3nTextConfig", takes=SHAPE),
    _TENSORS,
    f"text only; {_NOTES}",
)
