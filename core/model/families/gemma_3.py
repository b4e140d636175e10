"""Gemma 3, also as the text part of its models of images: norms of heads, and a rope for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

from ...requests.blocks import Blocks
from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.tensor_names import AROUND_NORMS, BESIDE_VISION, TensorNames
from ..specs.vision import PROJECTED, SEES
from . import gemma, reading, rotary
from .defaults import UNREAD, Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    ropes = rotary.ropes_by_type(fields, THETAS)
    pattern = fields.integer("sliding_window_pattern", 6) if fields.is_missing("layer_types") else 6
    return gemma.read_layers(fields, ropes, reading.layer_types(fields, pattern), Norms.AROUND, HeadNorm.EACH)


#: Fields of ropes' bases, and these.
THETAS = {reading.FULL: ("rope_theta", 1000000.0), reading.SLIDING: ("rope_local_base_freq", 10000.0)}


GEMMA_3 = Family(
    "Gemma 3",
    ("Gemma3ForCausalLM",),
    _read,
    Defaults("Gemma3TextConfig", takes=("vocab_size",)),
    TensorNames(names=AROUND_NORMS),
    nulls=("final_logit_softcapping",),
)
GEMMA_3_TEXT = Family(
    "Gemma 3 with images",
    ("Gemma3ForConditionalGeneration",),
    _read,
    Defaults("Gemma3TextConfig", {"final_logit_softcapping": UNREAD}, takes=("vocab_size",)),
    replace(BESIDE_VISION, names=AROUND_NORMS),
    notes=SEES,
    vision=replace(
        PROJECTED,
        arguments=("pixel_values",),
        copied=(),
        matrices=("multi_modal_projector.mm_input_projection_weight",),
        token=262144,
        blocks=Blocks.IMAGES,
    ),
)
