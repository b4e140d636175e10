"""Muse Glimmer's text: norms around each part, gates of attention's output, and layers with a window and a rope between
others that have neither.

Queries and keys are normalised without weights, and so are embeddings. The norms of what parts add have an eps of their
own, and the last norm's weights are stored as they are, where those of layers are stored less one.

Muse Spark's text: besides, every head's output is normalised, the residual stream and what parts add have learned
factors, and experts read latents.

Tests: tests/core/test_text_parts.py, tests/core/layers/test_gated_residual.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec, HeadNorm, OutputGate
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Experts, GatedSpec, LatentExperts, Routing, Scoring
from ...specs.norms import Norms, NormSpec
from ...specs.tensor_names import AROUND_NORMS, TEXT_AND_IMAGES, TensorNames
from .. import reading, rotary
from ..defaults import TOKENS, Defaults
from .layer import MuseLayer


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, reading.gated(fields, "hidden_activation"))


def _read_spark(fields: ConfigJson) -> ModelConfig:
    if fields.integer("hidden_size") % fields.integer("num_attention_heads"):
        raise fields.refuse("hidden_size", "transformers takes multiples of num_attention_heads alone")
    routing = Routing(
        1,
        Scoring.SIGMOID,
        renormalised=True,
        epsilon=1e-15,
        factor=fields.number("routed_scaling_factor"),
        corrected=True,
        logits_factor=fields.number("output_multiplier"),
    )
    latent = LatentExperts(fields.integer("moe_hidden_size"), fields.number("post_norm_eps"))
    experts = reading.experts(fields, routing, latent=latent)
    own = {"head_eps": reading.rms_norm(fields).eps, "temperature": fields.number("residual_gate_temperature")}
    return _model(fields, experts, reading.mlp_layer_types(fields, 0), **own)


def _mixers(fields: ConfigJson) -> list[AttentionSpec]:
    """Attention of each layer."""
    if fields.boolean("tie_word_embeddings"):
        why = "the embeddings are normalised, and the output projection is not; only false is supported"
        raise fields.refuse("tie_word_embeddings", why)
    attention = rotary.attention(fields, head_norm=HeadNorm.BARE, output_gate=OutputGate.PER_ELEMENT)
    attention = replace(attention, scale=attention.scale * fields.number("qk_scale_factor"))
    count = fields.integer("num_hidden_layers")
    every_fourth = [(count - 1 - at) % 4 == 0 for at in range(count)]
    types = reading.layer_types(fields, [reading.FULL if each else reading.SLIDING for each in every_fourth])
    rotates = [not each for each in every_fourth]
    if not fields.is_missing("layer_rope_theta"):
        rotates = [theta != 0 for theta in fields.numbers("layer_rope_theta")]
        if len(rotates) != count:
            raise fields.refuse("layer_rope_theta", f"{len(rotates)} bases for num_hidden_layers, {count}")
    kinds = zip(rotates, reading.windows_of(fields, types), strict=True)
    return [replace(attention, rope=attention.rope if turns else None, window=window) for turns, window in kinds]


def _model(
    fields: ConfigJson, feed_forward: GatedSpec | Experts, has_experts: Sequence[bool] = (), **own: float
) -> ModelConfig:
    """own: fields of layers."""
    eps = fields.number("rms_norm_eps")
    return reading.decoder(
        fields,
        _mixers(fields),
        feed_forward,
        NormSpec(eps, one_plus=True, wide=True),
        has_experts=has_experts,
        norms=Norms.AROUND,
        kind=partial(MuseLayer, out_eps=fields.number("post_norm_eps"), **own),
        last_norm=NormSpec(eps, wide=True),
        embedding_rows_eps=eps,
        logits_scale=fields.number("output_multiplier"),
        logits_softcap=fields.number("final_logit_softcapping"),
    )


_NAMES = TensorNames(
    prefixes=TEXT_AND_IMAGES.prefixes,
    names={**AROUND_NORMS, "self_attn.g_proj": "self_attn.gate_proj"},
    left_out=tuple(
        f"{outer}{part}."
        for outer in ("", "model.")
        for part in ("vision_tower", "vision_adapter", "vision_projection")
    ),
)
GLIMMER = Family(
    "Muse Glimmer (text)",
    ("MuseGlimmerForConditionalGeneration",),
    _read,
    Defaults("MuseGlimmerTextConfig", takes=TOKENS),
    _NAMES,
    notes="text only; adapters with rows of embeddings of their own are refused, as these are normalised",
)
SPARK = Family(
    "Muse Spark (text)",
    ("MuseSparkForConditionalGeneration",),
    _read_spark,
    Defaults("MuseSparkTextConfig", takes=TOKENS),
    replace(_NAMES, left_out=(*_NAMES.left_out, *(f"{outer}audio_tower." for outer in ("", "model.")))),
    notes=GLIMMER.notes,
)
