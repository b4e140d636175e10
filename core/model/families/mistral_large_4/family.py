"""Mistral Large 4: sparse attention over latents of keys and values alone. Frequencies of the rope have learned
factors, queries have log-n scaling with learned numbers, some layers have no rope, and some the latents of an
earlier one.

Tests: tests/core/layers/test_shared_latents.py, tests/core/test_text_parts.py
"""

from __future__ import annotations

from dataclasses import replace

from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Routing
from ...specs.tensor_names import BESIDE_VISION, LETTERS, TensorNames, gated_names
from .. import glm_moe, latent, reading
from ..defaults import Defaults
from .layer import MistralLarge4Layer

_INTERVAL = "no_rope_layer_interval"


def _read(fields: ConfigJson) -> ModelConfig:
    fields = fields.without("q_lora_rank")
    latent.check_indexed(fields)
    groups, kept = reading.expert_groups(fields)
    factor = fields.number("routed_scaling_factor")
    routing = Routing(1, renormalised=True, epsilon=1e-20, factor=factor, groups=groups, kept_groups=kept)
    has_experts = reading.mlp_layer_types(fields)
    model = glm_moe.model(fields, _mixers(fields), _TENSORS, routing=routing, has_experts=has_experts)
    layers = tuple(MistralLarge4Layer(each.mixer, each.feed_forward) for each in model.layers)
    return replace(model, layers=layers, logits_softcap=fields.number("final_logit_softcapping"))


def _mixers(fields: ConfigJson) -> list[AttentionSpec]:
    own = latent.attention(fields, interleaved=True)
    assert own.latent is not None and own.rope is not None, "`latent.attention` gives both"
    sizes, rope = replace(own.latent, eps=reading.rms_norm(fields).eps), replace(own.rope, is_learned=True)
    turned = latent.with_indexer(fields, replace(own, latent=sizes, rope=rope), interleaved=True)
    assert turned.indexer is not None, "`latent.with_indexer` gives it"
    still = replace(
        turned,
        head_dim=sizes.kv_rank,
        rope=None,
        indexer=replace(turned.indexer, rope=None),
        form="still",
        latent=replace(sizes, key_dim=sizes.key_dim + sizes.rotated_dim, rotated_dim=0, form="still"),
    )
    rotates = _rotates(fields)
    sources = _sources(fields, rotates)
    kinds = zip(rotates, latent.indexer_kinds(fields), sources, strict=True)
    return [
        replace(
            turned if has_rope else still,
            **({} if kind == latent.FULL else {"indexer": None}),
            shares_kv=source != layer,
        )
        for layer, (has_rope, kind, source) in enumerate(kinds)
    ]


def _rotates(fields: ConfigJson) -> list[bool]:
    """Which layers have a rope: by `no_rope_layers`, 1 where one has, or all but one in every interval."""
    count, name = fields.integer("num_hidden_layers"), "no_rope_layers"
    if fields.is_missing(name):
        every = fields.integer(_INTERVAL, 4)
        return [(layer + 1) % every != 0 for layer in range(count)]
    if len(given := fields.indices(name)) < count:
        raise fields.refuse(name, f"{len(given)} values for num_hidden_layers, {count}")
    return [bool(each) for each in given[:count]]


def _sources(fields: ConfigJson, rotates: list[bool]) -> list[int]:
    """The layer whose latents each layer has. transformers gives a layer those of the last one before it that others
    use, too, with a rope or without, whichever it names.
    """
    count, name = fields.integer("num_hidden_layers"), "kv_source_layers"
    sources = [*range(count)] if fields.is_missing(name) else [*fields.indices(name)]
    if len(sources) != count:
        raise fields.refuse(name, f"{len(sources)} values for num_hidden_layers, {count}")
    if any(source > layer or sources[source] != source for layer, source in enumerate(sources)):
        raise fields.refuse(name, "each must be the layer itself, or an earlier one that is its own")
    last: dict[bool, int] = {}
    for layer, source in enumerate(sources):
        if source == layer:
            last[rotates[layer]] = layer
        elif last.get(rotates[layer]) != source:
            why = "a layer can only have those of the last one before it, with a rope or without as it has one"
            raise fields.refuse(name, f"the latents of layer {source} for layer {layer}: {why}")
    return sources


_ATTENTION = {
    "q_proj": "wq",
    "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
    "k_norm": "kv_a_norm",
    **{f"indexer.{part}": f"indexer.{part}" for part in ("wq_b", "wk", "weights_proj", "k_norm", "q_input_norm")},
    **{
        f"{part}softmax_scaling.{end}": f"{part}ssmax_scaling.{end[0]}"
        for part in ("", "indexer.")
        for end in ("scale", "bias")
    },
}
_PUBLISHED = TensorNames(
    prefixes=("",),
    heads=("output.weight",),
    embeddings="tok_embeddings",
    rope_factors="lerope.alpha",
    names={
        "attention_norm": "attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "gate",
        **{f"self_attn.{part}": f"attention.{name}" for part, name in _ATTENTION.items()},
        **gated_names("mlp", "feed_forward", LETTERS),
        **gated_names("mlp.shared_expert", "shared_experts", LETTERS),
        **gated_names("mlp.experts.{}", "experts.{}", LETTERS),
    },
)
_TOWER = ("vision_encoder.", "pre_mm_projector_norm.", "patch_merger.", "vision_language_adapter.")
_DRAFTS = ("mtp_dspark.", "model.mtp_dspark.", "language_model.mtp_dspark.")
_TENSORS = replace(
    BESIDE_VISION,
    names=glm_moe.NAMES,
    left_out=(*BESIDE_VISION.left_out, *_TOWER, *_DRAFTS),
    published=(_PUBLISHED,),
)

MISTRAL_LARGE_4 = Family(
    "Mistral Large 4 (text)",
    ("MistralLarge4ForConditionalGeneration",),
    _read,
    Defaults(
        "MistralLarge4TextConfig",
        {"q_lora_rank": None, "num_nextn_predict_layers": 0},
        takes=("intermediate_size", "bos_token_id"),
    ),
    _TENSORS,
    notes=f"{reading.INDEXER_NOTE}; with `kv_source_layers` {reading.ON_OPERATORS}; draft layers (`mtp_dspark`) are "
    "left out",
    nulls=("indexer_types", "index_topk_pattern", "kv_source_layers", "num_key_value_heads"),
)
