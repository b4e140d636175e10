"""Mistral, Ministral 8B, Mistral Small 3 and Ministral 3: Llama's shape with attention windows.

Mistral Small 4 has latent attention and a mixture of experts.

Tests: tests/core/test_text_parts.py, tests/core/model/specs/test_published_configs.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import TemperatureTuning
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import BESIDE_VISION
from ..specs.vision import PROJECTED, SEES
from . import glm_moe, latent, reading, rotary
from .defaults import UNREAD, Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    """transformers takes a model of text alone for Ministral where it has `layer_types`; see `_read_part`."""
    return _read_ministral(fields) if "layer_types" in fields.raw else _read_part(fields)


def _read_part(fields: ConfigJson) -> ModelConfig:
    """A text part, whose `layer_types` transformers leaves out: all layers have the window."""
    rotary.rope_fields(fields).states(_BETA)  # of Ministral 3 alone
    return _model(fields, [fields.optional("sliding_window")] * fields.integer("num_hidden_layers"))


def _read_ministral(fields: ConfigJson) -> ModelConfig:
    rotary.rope_fields(fields).states(_BETA)
    types = reading.layer_types(fields, [reading.SLIDING] * fields.integer("num_hidden_layers"))
    if fields.is_null("sliding_window"):
        raise fields.refuse("sliding_window", "transformers needs one, also where no layer has it")
    return _model(fields, reading.windows_of(fields, types))


def _read_ministral_3(fields: ConfigJson) -> ModelConfig:
    """As of Mistral's text parts, `layer_types` has no effect."""
    windows = [fields.optional("sliding_window")] * fields.integer("num_hidden_layers")
    return _model(fields, windows, _log_scaling(fields))


def _model(fields: ConfigJson, windows: Sequence[int | None], scaling: TemperatureTuning | None = None) -> ModelConfig:
    attention = rotary.attention(fields, bias=False, log_scaling=scaling)
    return reading.decoder(fields, [replace(attention, window=each) for each in windows], reading.gated(fields))


def _read_4(fields: ConfigJson) -> ModelConfig:
    scaling = _log_scaling(fields)
    attention = latent.attention(fields, interleaved=fields.boolean("rope_interleave"), scaling=scaling)
    groups = fields.integer("n_group")
    routing = Routing(
        1,
        renormalised=fields.boolean("norm_topk_prob"),
        epsilon=1e-20,
        factor=fields.number("routed_scaling_factor"),
        groups=groups,
        kept_groups=min(groups, fields.integer("topk_group")),
    )
    return glm_moe.model(fields, attention, routing=routing)


def _read_beside_vision(fields: ConfigJson) -> ModelConfig:
    """The text model of a vision model is Mistral Small 4's, Ministral 3's or an earlier one, as `model_type` says."""
    kind = fields.text("model_type", "mistral")
    if kind == "ministral3":
        return MINISTRAL_3.read(fields.with_defaults(MINISTRAL_3.defaults))
    if kind != "mistral4":
        return _read_part(fields.with_defaults(MISTRAL.defaults))
    model = _read_4(fields.with_defaults(MISTRAL_4.defaults))
    return replace(model, tensors=replace(BESIDE_VISION, names=model.tensors.names))


def _log_scaling(fields: ConfigJson) -> TemperatureTuning:
    """Of Ministral 3."""
    rope = rotary.rope_fields(fields)
    return TemperatureTuning(rope.number(_BETA), rotary.original_positions(rope, fields))


_BETA = "llama_4_scaling_beta"

MISTRAL = Family(
    "Mistral",
    ("MistralForCausalLM",),
    _read,
    Defaults("MistralConfig"),
    nulls=("head_dim",),
)
MISTRAL_PART = replace(MISTRAL, architectures=(), read=_read_part)
MINISTRAL = Family(
    "Ministral 8B",
    ("MinistralForCausalLM",),
    _read_ministral,
    Defaults("MinistralConfig"),
    nulls=("head_dim",),
)
MINISTRAL_3 = Family(
    "Ministral 3",
    ("Ministral3ForCausalLM",),
    _read_ministral_3,
    Defaults("Ministral3Config"),
)
MISTRAL_4 = Family(
    "Mistral Small 4 (text)",
    ("Mistral4ForCausalLM",),
    _read_4,
    Defaults(
        "Mistral4Config",
        {"num_nextn_predict_layers": 0, "partial_rotary_factor": UNREAD},
        takes=("intermediate_size",),
    ),
    glm_moe.TENSORS,
    notes=reading.LATENTS_NOTE,
    nulls=("head_dim", "num_key_value_heads", "v_head_dim"),
)
MISTRAL_3 = Family(
    "Mistral Small 3 and 4, and Ministral 3",
    ("Mistral3ForConditionalGeneration",),
    _read_beside_vision,
    tensors=BESIDE_VISION,
    notes=SEES,
    nulls=("head_dim",),
    vision=replace(PROJECTED, copied=("linear_1", "linear_2", "patch_merger"), token=10, least_rows=2),
)
