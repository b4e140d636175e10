"""Dots 3 Note: latents of queries, keys and values have factors, the rotated key has a norm, and heads have gates. Some
layers attend to the tokens that an indexer chooses, others have windows, over latents of other sizes.

Tests: tests/core/layers/test_latent_windows.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec, OutputGate
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.tensor_names import TensorNames
from .. import glm_moe, latent, reading
from ..defaults import Defaults
from ..reading import FULL, SLIDING
from .layer import Dots3Layer

INDEXED = "indexed_attention"

#: Sizes of layers with windows in published checkpoints, with `swa_` before their names, and transformers' defaults.
_SIZES = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
_ROTATED, _BY_LAYER = "qk_rope_head_dim", "per_layer_config"


def _read(fields: ConfigJson) -> ModelConfig:
    types = _types(fields)
    if SLIDING in types and fields.is_missing("sliding_window"):
        fields = fields.with_values({"sliding_window": fields.integer("sliding_window_size", 512)})
    of_types = _fields_of_types(fields, types)
    windows = dict(zip(types, reading.windows_of(fields, types), strict=True))
    mixers = {kind: replace(_mixer(own, kind, types), window=windows[kind]) for kind, own in of_types.items()}
    fields = reading.renamed(fields, {"shared_experts_intermediate_size": "moe_shared_expert_intermediate_size"})
    shared = fields.integer("n_shared_experts") * fields.integer("shared_experts_intermediate_size")
    experts = reading.experts(fields, reading.routing_in_groups(fields), shared=shared)
    if experts.count < 2 * experts.routing.groups:
        raise fields.refuse("n_routed_experts", "a group must have at least two")
    has_experts = _has_experts(fields)
    drafts = (f"{prefix}{part}." for prefix in TENSORS.prefixes for part in (f"layers.{len(types)}", "mtp"))
    tensors = replace(TENSORS, left_out=(*TENSORS.left_out, *drafts))
    own = [mixers[kind] for kind in types]
    return reading.decoder(fields, own, experts, has_experts=has_experts, kind=Dots3Layer, tensors=tensors)


def _types(fields: ConfigJson) -> list[str]:
    """Types of layers. Published checkpoints call those with an indexer full, unless `use_dsa` is false."""
    count, given = fields.integer("num_hidden_layers"), fields.texts("layer_types")
    types = given or _default_types(count, has_windows=fields.boolean("use_sliding_window", True))
    if not given or _BY_LAYER not in fields.raw or not fields.is_missing("use_dsa"):
        named = INDEXED if fields.boolean("use_dsa", True) else FULL
        types = [named if kind in (FULL, INDEXED) else kind for kind in types]
    return reading.checked_types(fields, types, (FULL, INDEXED, SLIDING))


def _default_types(count: int, *, has_windows: bool) -> list[str]:
    return [SLIDING if has_windows and layer >= 2 and layer % 4 != 1 else FULL for layer in range(count)]


def _fields_of_types(fields: ConfigJson, types: list[str]) -> dict[str, ConfigJson]:
    """The fields of each type of layer: `per_layer_config` has those that differ from all layers'."""
    kinds = dict.fromkeys(types)
    if _BY_LAYER not in fields.raw:
        own = {name: fields.integer(f"swa_{name}", default) for name, default in _SIZES.items()}
        rotated = max(1, own["head_dim"] - own["qk_nope_head_dim"])
        own[_ROTATED] = fields.integer(f"swa_{_ROTATED}", rotated)
        return {kind: _checked(fields, own if kind == SLIDING else {}, kind) for kind in kinds}
    layers = [dict(own.raw) for own in reading.fields_by_layer(fields, len(types), (*_SIZES, _ROTATED))]
    found = {kind: layers[types.index(kind)] for kind in kinds}
    if any(found[kind] != own for kind, own in zip(types, layers, strict=True)):
        raise fields.refuse(_BY_LAYER, "layers of one type must have the same sizes")
    return {kind: _checked(fields, own, kind) for kind, own in found.items()}


def _checked(fields: ConfigJson, own: dict[str, Any], kind: str) -> ConfigJson:
    """All fields of a type of layer, with the rope's share of a head, which transformers gives the size of one."""
    found = fields.with_values(own)
    if found.has("head_dim"):
        found.integer("head_dim")
    if kind == SLIDING:
        sizes = found.integer("qk_nope_head_dim") + found.integer(_ROTATED)
        if found.integer("head_dim") != sizes:
            raise found.refuse("head_dim", f"in layers of {SLIDING} it must be {sizes}, as latents have it")
    return found.without("partial_rotary_factor")


def _mixer(fields: ConfigJson, kind: str, types: list[str]) -> AttentionSpec:
    latent.check_query_latents(fields)
    own = latent.attention(fields, interleaved=True, of=_rope(fields, kind, types))
    own = latent.with_indexer(fields, own, interleaved=True) if kind == INDEXED else own
    form = "sliding" if kind == SLIDING else "full" * (kind == FULL and INDEXED in types)
    hidden, sizes = fields.integer("hidden_size"), own.latent
    assert sizes is not None, "`latent.attention` gives them"
    return replace(
        own,
        output_gate=OutputGate.PER_HEAD,
        form=form,
        latent=replace(
            sizes,
            eps=reading.rms_norm(fields).eps,
            q_factor=(hidden / sizes.q_rank) ** 0.5,
            kv_factor=(hidden / sizes.kv_rank) ** 0.5,
            form=form,
        ),
    )


def _rope(fields: ConfigJson, kind: str, types: list[str]) -> ConfigJson:
    """The object of the rope of a type of layer, or of all."""
    if not fields.is_missing("rope_scaling") and not fields.is_missing("rope_parameters"):
        raise fields.refuse("rope_scaling", "it is an older name of rope_parameters; give one of them")
    if fields.raw.get("rope_parameters") == {}:
        raise fields.refuse("rope_parameters", "transformers takes it for no rope's base of its own; leave it out")
    theta = fields.number("rope_theta")
    given = fields.object("rope_parameters") or fields.object("rope_scaling")
    if given is None:
        base = fields.number("swa_rope_theta", 50000.0) if kind == SLIDING else theta
        return fields.part("rope_parameters", {"rope_type": "default", "rope_theta": base})
    is_nested = any(each in given.raw for each in types)
    if (own := given.object(kind) if is_nested else given) is None:
        raise fields.refuse("rope_parameters", f"layers of {kind} need an object of that name in it")
    own = own.without("partial_rotary_factor")
    return own if "rope_theta" in own.raw else own.with_values({"rope_theta": theta})


def _has_experts(fields: ConfigJson) -> list[bool]:
    """Which layers have experts: by `mlp_layer_types`, or by `moe_layer_freq`, a number or a list, after the first."""
    if fields.texts("mlp_layer_types"):
        return reading.mlp_layer_types(fields, 0)
    count, first = fields.integer("num_hidden_layers"), fields.integer("first_k_dense_replace", 1, least=0)
    if isinstance(fields.raw.get("moe_layer_freq"), list):
        every = fields.indices("moe_layer_freq")
        if len(every) < count:
            raise fields.refuse("moe_layer_freq", f"{len(every)} numbers for num_hidden_layers, {count}")
        return [layer >= first and bool(every[layer]) for layer in range(count)]
    number = fields.integer("moe_layer_freq", 1)
    return [layer >= first and layer % number == 0 for layer in range(count)]


_TOWERS = ("vision", "audio"), ("tower", "encoder")
TENSORS = TensorNames(
    prefixes=("model.language_model.", "model."),
    names={**glm_moe.NAMES, "self_attn.k_rotated_norm": "self_attn.k_rope_only_layernorm"},
    left_out=tuple(f"{outer}{part}_{kind}." for outer in ("model.", "") for part, kind in product(*_TOWERS)),
)

DOTS_3_NOTE = Family(
    "Dots 3 Note",
    ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
    _read,
    Defaults("Dots3NoteTextConfig", {"rope_theta": 80000000.0}, takes=("intermediate_size",)),
    TENSORS,
    notes=f"{reading.INDEXER_NOTE}; draft layers after the last are left out",
    nulls=("num_key_value_heads",),
)
