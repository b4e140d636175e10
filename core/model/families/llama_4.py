"""Llama 4, also as the text part of its models of images: attention to chunks, and experts of weighted inputs.

Tests: tests/core/test_chunks.py, tests/core/test_experts.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm, TemperatureTuning
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing, Scoring
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import BESIDE_VISION, LLAMA_NORMS, TensorNames, gated_names, stacked_names
from . import reading, rotary
from .defaults import Defaults

_CHUNKED = "chunked_attention"


def _read(fields: ConfigJson) -> ModelConfig:
    count, routing = fields.integer("num_hidden_layers"), Routing(1, Scoring.SIGMOID_OF_CHOSEN, of_inputs=True)
    has_experts = _layers_with_experts(fields, count)
    size = "intermediate_size"
    experts = reading.experts(fields, routing, size=size, shared=fields.integer(size))
    dense = experts if all(has_experts) else reading.gated(fields, size="intermediate_size_mlp")
    rotates = _rotates(fields, count)
    layers = [
        DecoderLayer(mixer, experts if it else dense)
        for mixer, it in zip(_attention(fields, rotates), has_experts, strict=True)
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields))


def _attention(fields: ConfigJson, rotates: list[bool]) -> list[AttentionSpec]:
    attention, chunk = (
        rotary.attention(fields, interleaved=True, adjust=_checked),
        fields.optional("attention_chunk_size"),
    )
    scaling = None
    if _is_tuned(fields):
        scaling = TemperatureTuning(fields.number("attn_scale"), fields.integer("floor_scale"), first=1)
    default = [_CHUNKED if rotated and chunk is not None else reading.FULL for rotated in rotates]
    types = reading.layer_types(fields, default, _CHUNKED)
    if chunk is None and _CHUNKED in types:
        raise fields.refuse("attention_chunk_size", "layers with chunked attention need it")
    is_normed = fields.boolean("use_qk_norm")
    return [
        replace(
            attention,
            rope=attention.rope if rotated else None,
            window=chunk if kind == _CHUNKED else None,
            chunked=kind == _CHUNKED,
            head_norm=HeadNorm.BARE if is_normed and rotated else None,
            log_scaling=None if rotated else scaling,
        )
        for rotated, kind in zip(rotates, types, strict=True)
    ]


def _is_tuned(fields: ConfigJson) -> bool:
    """True if attention temperature is tuned. Scout was published with a number, 4, where transformers has a truth
    value since.
    """
    value = fields.raw.get(name := "attn_temperature_tuning")
    return fields.boolean(name) if type(value) is not int or value < 1 else True


def _checked(fields: ConfigJson, rope: RopeConfig) -> RopeConfig:
    if rope.attention_factor != 1 and fields.boolean("use_qk_norm"):
        raise fields.refuse("use_qk_norm", "heads are normalised with ropes that don't change their norms alone")
    return rope


def _rotates(fields: ConfigJson, count: int) -> list[bool]:
    """Which layers have a rope."""
    interval = fields.integer("no_rope_layer_interval")
    given = [bool(each) for each in fields.numbers("no_rope_layers")]
    rotates = given or [(index + 1) % interval != 0 for index in range(count)]
    if len(rotates) < count:
        raise fields.refuse("no_rope_layers", f"{len(rotates)} values for num_hidden_layers, {count}")
    return rotates[:count]


def _layers_with_experts(fields: ConfigJson, count: int) -> list[bool]:
    if fields.has("moe_layers"):
        chosen = set(fields.indices("moe_layers"))
    else:
        step = fields.integer("interleave_moe_layer_step")
        chosen = set(range(step - 1, count, step))
    return [index in chosen for index in range(count)]


_NAMES = {
    **LLAMA_NORMS,
    "mlp.gate": "feed_forward.router",
    **gated_names("mlp", "feed_forward"),
    **gated_names("mlp.shared_expert", "feed_forward.shared_expert"),
    **gated_names("mlp.experts.{}", "feed_forward.experts.{}"),
}
_TENSORS = TensorNames(
    names=_NAMES,
    stacked_experts=stacked_names("feed_forward.experts"),
    transposed=True,
    swapped=True,
    head_part="language_model",
)
_NOTES = "chunks of attention are sequences of their own, in every backend; `block_tokens` must divide them"

LLAMA_4 = Family(
    "Llama 4",
    ("Llama4ForCausalLM",),
    _read,
    Defaults("Llama4TextConfig", takes=("vocab_size", "intermediate_size")),
    _TENSORS,
    notes=_NOTES,
)
LLAMA_4_TEXT = Family(
    "Llama 4 (text)",
    ("Llama4ForConditionalGeneration",),
    _read,
    Defaults("Llama4TextConfig", takes=("vocab_size", "intermediate_size")),
    replace(
        _TENSORS,
        prefixes=BESIDE_VISION.prefixes,
        heads=BESIDE_VISION.heads,
        left_out=("vision_model.", "multi_modal_projector."),
    ),
    notes=_NOTES,
    head_part="text_config",
)
