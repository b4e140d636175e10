"""Gemma 4, also as the text part of its models of images and sound: full attention has another shape than windows.

Tests: tests/core/layers/test_attention_shapes.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ....requests.blocks import Blocks
from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec, HeadNorm
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Experts, Routing
from ...specs.layers import LayerSpec, PerLayerEmbeddingSpec
from ...specs.norms import Norms
from ...specs.rope_config import RopeConfig
from ...specs.tensor_names import AROUND_NORMS, BESIDE_VISION, TensorNames, stacked_names
from ...specs.vision import SEES, VisionSpec
from .. import reading, rotary
from ..defaults import Defaults
from ..reading import FULL, SLIDING, Heads
from .layer import Gemma4Layer

#: Ropes of layers where `rope_parameters` is missing.
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}

_ACTIVATION = "hidden_activation"


def _read(fields: ConfigJson, tensors: TensorNames) -> ModelConfig:
    if fields.has(name := "use_bidirectional_attention") and fields.text(name) != "vision":
        raise fields.refuse(name, "only causal attention of text is supported")
    types = reading.layer_types(fields, 6)
    types[-1] = FULL  # as transformers has it, whatever the field says
    first_shared, windows = first_shared_layer(fields, types), reading.windows_of(fields, types)
    shapes = _shapes(fields, types)
    ropes = {each: _rope(fields, *each) for each in dict.fromkeys(zip(types, shapes, strict=True))}
    experts = _experts(fields) if fields.boolean("enable_moe_block") else None
    bias, keys_are_values = fields.boolean("attention_bias"), fields.boolean("attention_k_eq_v")
    per_layer = _per_layer_embeddings(fields)
    if per_layer is None and first_shared < len(types):
        raise fields.refuse(
            "num_kv_shared_layers", "transformers fails for such layers if hidden_size_per_layer_input is 0"
        )
    feed_forward = reading.gated(fields, _ACTIVATION)
    wide = replace(feed_forward, size=2 * feed_forward.size, form="wide")
    if not fields.boolean("use_double_wide_mlp"):
        wide = feed_forward
    layers = [
        Gemma4Layer(
            AttentionSpec(
                *shape,
                scale=1.0,
                rope=ropes[seen, shape],
                window=window,
                head_norm=HeadNorm.EACH,
                qkv_bias=bias,
                o_bias=bias,
                keys_are_values=keys_are_values and seen == FULL,
                shares_kv=index >= first_shared,
                value_norm=True,
                form="full" if seen == FULL else "",
            ),
            wide if index >= first_shared else feed_forward,
            Norms.AROUND,
            per_layer_size=0 if per_layer is None else per_layer.size,
            beside=experts,
        )
        for index, (seen, shape, window) in enumerate(zip(types, shapes, windows, strict=True))
    ]
    return model_of(fields, layers, per_layer, tensors, first_shared)


def model_of(
    fields: ConfigJson,
    layers: Sequence[LayerSpec],
    per_layer: PerLayerEmbeddingSpec | None,
    tensors: TensorNames,
    first_shared: int,
) -> ModelConfig:
    """A model with these names, but for keys and values of layers that read those of others: checkpoints, and
    adapters of older versions, have some.
    """
    unused = tuple(
        f"{prefix}layers.{index}.self_attn.{name}."
        for prefix in dict.fromkeys((*tensors.prefixes, "model."))
        for index in range(first_shared, len(layers))
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    return reading.dense(
        fields,
        layers,
        reading.rms_norm(fields, wide=True),
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logits_softcap=reading.optional_number(fields, "final_logit_softcapping"),
        per_layer_embeddings=per_layer,
        tensors=replace(tensors, left_out=(*tensors.left_out, *unused)),
    )


def first_shared_layer(fields: ConfigJson, types: list[str]) -> int:
    """The first of the layers that read the keys and values of layers before them."""
    first = len(types) - fields.integer(name := "num_kv_shared_layers", least=0)
    if first <= 0 or set(types[:first]) != set(types):
        raise fields.refuse(name, f"of {len(types)} layers, some of each type must have keys and values of their own")
    return first


def _per_layer_embeddings(fields: ConfigJson) -> PerLayerEmbeddingSpec | None:
    size, vocab = fields.integer("hidden_size_per_layer_input", least=0), fields.integer("vocab_size_per_layer_input")
    if not size:
        return None
    if vocab < fields.integer("vocab_size"):
        raise fields.refuse("vocab_size_per_layer_input", "every token of vocab_size needs a row")
    return PerLayerEmbeddingSpec(size, vocab)


def _shapes(fields: ConfigJson, types: list[str]) -> list[Heads]:
    """Heads of each layer. transformers writes those that differ in `per_layer_config`; published checkpoints have
    fields for all layers of full attention.
    """
    heads = reading.heads(fields)
    if "per_layer_config" not in fields.raw:
        kv_heads = fields.optional("num_global_key_value_heads") if fields.boolean("attention_k_eq_v") else None
        others = {"head_dim": fields.integer("global_head_dim"), "num_key_value_heads": kv_heads or heads.num_kv_heads}
        full = reading.heads(fields.with_values(others))
        return [full if seen == FULL else heads for seen in types]
    return _shapes_by_layer(fields, types, heads)


def _shapes_by_layer(fields: ConfigJson, types: list[str], heads: Heads) -> list[Heads]:
    """heads: of layers without fields of their own."""
    each = reading.fields_by_layer(fields, len(types), ("head_dim", "num_key_value_heads"))
    found = [reading.heads(fields.with_values(own.raw)) if own.raw else heads for own in each]
    if len({*zip(types, found, strict=True)}) > len({*types}):
        raise fields.refuse("per_layer_config", "layers of one type must have the same shape")
    return found


def _experts(fields: ConfigJson) -> Experts:
    count, per_token = fields.integer("num_experts"), fields.integer("top_k_experts")
    if per_token > count:
        raise fields.refuse("top_k_experts", f"num_experts is {count}; it can't be more than that")
    routing = Routing(per_token, renormalised=True, scaled=True)
    activation = reading.gated(fields, _ACTIVATION).activation
    return Experts(count, fields.integer("moe_intermediate_size"), routing, activation)


def _rope(fields: ConfigJson, kind: str, heads: Heads) -> RopeConfig:
    return rotary.rope_of_type(fields, heads.head_dim, rotary.whole_rope(fields, kind, _ROPES))


_NAMES = {
    **AROUND_NORMS,
    "dense_out_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_out_norm": "post_feedforward_layernorm_2",
    "input_norm": "post_per_layer_input_norm",
    "mlp.gate": "router.proj",
}
_EXPERTS = stacked_names("experts")
_PLAIN = TensorNames(names=_NAMES, stacked_experts=_EXPERTS)
_TENSORS = replace(
    BESIDE_VISION,
    names=_NAMES,
    stacked_experts=_EXPERTS,
    left_out=tuple(
        f"model.{each}." for each in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
    ),
)

_read_plain, _read_text = partial(_read, tensors=_PLAIN), partial(_read, tensors=_TENSORS)

_NULLS = ("final_logit_softcapping",)

GEMMA_4 = Family(
    "Gemma 4",
    ("Gemma4ForCausalLM",),
    _read_plain,
    Defaults("Gemma4TextConfig", {"global_head_dim": 512}, takes=("vocab_size",)),
    _PLAIN,
    nulls=_NULLS,
)
GEMMA_4_TEXT = Family(
    "Gemma 4 with images",
    ("Gemma4ForConditionalGeneration",),
    _read_text,
    Defaults("Gemma4TextConfig", {"global_head_dim": 512}, takes=("vocab_size",)),
    _TENSORS,
    f"{SEES}, no sound",
    nulls=_NULLS,
    vision=VisionSpec(
        ("vision_tower", "embed_vision"),
        ("pixel_values", "image_position_ids"),
        copied=("embedding_projection",),
        token=258880,
        blocks=Blocks.IMAGES,
        blocks_are_optional=True,
        pads_lookups=True,
    ),
)
_UNIFIED = Defaults(
    "Gemma4UnifiedTextConfig",
    {"global_head_dim": 512, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262144},
    takes=("vocab_size",),
)
GEMMA_4_UNIFIED = Family(
    "Gemma 4 Unified",
    ("Gemma4UnifiedForCausalLM",),
    _read_plain,
    _UNIFIED,
    _PLAIN,
    nulls=_NULLS,
)
GEMMA_4_UNIFIED_TEXT = Family(
    "Gemma 4 Unified (text)",
    ("Gemma4UnifiedForConditionalGeneration",),
    _read_text,
    _UNIFIED,
    _TENSORS,
    nulls=_NULLS,
)
