"""Step 3.7's text: layers with windows have heads of queries of a number of their own, every head has a gate, and some
layers bound what goes into their outputs: experts by other numbers than the shared one. Experts are chosen by sigmoids
with a learned correction.

Tests: tests/core/layers/test_bounds.py, tests/core/paths
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson, is_number
from ..specs.attention import AttentionSpec, HeadNorm, OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Activation, BoundedSwiglu, GatedSpec
from ..specs.tensor_names import CORRECTION, LETTERS, LLAMA_NORMS, SHARED_EXPERTS, TensorNames, gated_names
from . import reading, rotary
from .defaults import UNREAD, Defaults
from .reading import FULL, SLIDING

#: Names of fields here, and those which transformers takes for them.
_FIELDS = {
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "num_key_value_heads": "num_attention_groups",
    "share_expert_dim": "share_expert_dims",
    "num_nextn_predict_layers": "num_mtp_layers",
}
#: Lists of a value for each layer, behind which published checkpoints have those of draft layers.
_LISTS = ("layer_types", "mlp_layer_types", *(_LIMITS := ("swiglu_limits", "swiglu_limits_shared")))
_ROPE_LISTS = ("rope_theta", "partial_rotary_factors")


def _read(fields: ConfigJson) -> ModelConfig:
    fields = _without_drafts(reading.renamed(fields, _FIELDS))
    _check(fields)
    types = reading.layer_types(fields, 1)
    has_experts = _has_experts(fields)
    routing = reading.sigmoid_routing(fields, "moe_router_scaling_factor")
    fields.text("hidden_act", "silu")  # transformers takes silu, whatever text it is
    experts = reading.experts(fields.without("hidden_act"), routing, shared=fields.integer("share_expert_dim"))
    plain = GatedSpec(fields.integer("intermediate_size"))
    layers = [
        DecoderLayer(mixer, replace(experts, activation=own, shared_activation=shared if own != shared else None))
        if it
        else DecoderLayer(mixer, replace(plain, activation=shared))
        for mixer, it, own, shared in zip(
            _mixers(fields, types), has_experts, *(_bounds(fields, name) for name in _LIMITS), strict=True
        )
    ]
    left_out = (f"{prefix}layers.{at}." for prefix in ("model.", "model.language_model.") for at in _drafts(fields))
    named = replace(_NAMES, left_out=(*_NAMES.left_out, *left_out))
    named = replace(named, published=(replace(_PUBLISHED, left_out=named.left_out),))
    return reading.dense(fields, layers, reading.rms_norm(fields, one_plus=True), tensors=named)


def _drafts(fields: ConfigJson) -> range:
    """Numbers of the draft layers."""
    count = fields.integer("num_hidden_layers")
    return range(count, count + reading.number_of(fields, "num_nextn_predict_layers"))


def _without_drafts(fields: ConfigJson) -> ConfigJson:
    """The fields without values of draft layers in lists of all layers."""
    drafts = _drafts(fields)
    lists = {name: fields.raw.get(name) for name in (*_LISTS, *_ROPE_LISTS)}
    cut = {
        name: given[: drafts.start]
        for name, given in lists.items()
        if drafts and isinstance(given, list) and len(given) == drafts.stop
    }
    return fields.with_values(cut)


def _check(fields: ConfigJson) -> None:
    """Refuse what transformers leaves out for this family, or fails with."""
    count = fields.integer("n_routed_experts")
    if fields.raw.get("num_local_experts", count) != count:
        raise fields.refuse("num_local_experts", f"transformers reads n_routed_experts, {count}, in its place")
    if fields.boolean("mlp_bias"):
        raise fields.refuse("mlp_bias", "shared experts are supported without biases; supported: false")
    if fields.raw.get("gating", True) not in (True, "per-head"):
        raise fields.refuse("gating", "transformers has one gate of each head; supported: true, per-head")
    if fields.raw.get("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "only causal attention is supported")


def _mixers(fields: ConfigJson, types: list[str]) -> Iterable[AttentionSpec]:
    """Attention of each layer."""
    ropes = _ropes(fields, types)
    own = rotary.attention(fields, rope=None, head_norm=HeadNorm.EACH, output_gate=OutputGate.PER_HEAD)
    scale = reading.optional_number(fields, "query_pre_attn_scalar") or own.head_dim
    for kind, window, heads in zip(types, reading.windows_of(fields, types), _heads(fields, types), strict=True):
        if heads % own.num_kv_heads:
            why = f"the heads of a layer, {heads}, must be a multiple of it"
            raise fields.refuse("num_key_value_heads", why)
        yield replace(
            own,
            num_heads=heads,
            scale=scale**-0.5,
            rope=ropes[kind],
            window=window,
            form="" if heads == own.num_heads else f"{heads} heads",
        )


def _heads(fields: ConfigJson, types: list[str]) -> list[int]:
    """Heads of queries of each layer."""
    name, count = "num_attention_heads", fields.integer("num_attention_heads")
    if "per_layer_config" in fields.raw:
        return [own.integer(name, count) for own in reading.fields_by_layer(fields, len(types), (name,))]
    sliding = fields.optional("num_sliding_attention_heads")
    if sliding is None:
        other = fields.object("attention_other_setting")
        sliding = count if other is None else other.integer(name, count)
    return [sliding if kind == SLIDING else count for kind in types]


def _has_experts(fields: ConfigJson) -> list[bool]:
    """Which layers have experts: by `mlp_layer_types`; else those of `moe_layers_enum`, a list or a text of numbers;
    else all after the first three.
    """
    given = fields.raw.get("moe_layers_enum")
    if given is None or not fields.is_missing("mlp_layer_types"):
        return reading.mlp_layer_types(fields, 3)
    items = given.split(",") if isinstance(given, str) else given
    if not isinstance(items, list) or not all(str(each).strip().isdecimal() for each in items if str(each).strip()):
        raise fields.refuse("moe_layers_enum", "numbers of layers are needed, in a list or with commas between them")
    sparse = {int(each) for each in items if str(each).strip()}
    return [at in sparse for at in range(fields.integer("num_hidden_layers"))]


def _bounds(fields: ConfigJson, name: str) -> list[Activation | BoundedSwiglu]:
    """The activation of each layer, by its bound; 0 and null mean that there is none."""
    given, count = fields.raw.get(name) or [], fields.integer("num_hidden_layers")
    if not isinstance(given, list) or not all(
        each is None or (is_number(each) and 0 <= each <= 1e12) for each in given
    ):
        raise fields.refuse(name, "a list of numbers of at least 0 is needed, or null for layers without a bound")
    if given and len(given) < count:
        raise fields.refuse(name, f"{len(given)} bounds for num_hidden_layers, {count}")
    bounds = given[:count] or [None] * count
    return [BoundedSwiglu(float(each)) if each else Activation.SILU for each in bounds]


def _ropes(fields: ConfigJson, types: list[str]) -> dict[str, Any]:
    """The rope of each type of layers, by `rope_parameters` of all types; else by lists of a number for each layer, of
    which `rope_scaling` belongs to layers without windows.
    """
    given, kinds = fields.object("rope_parameters"), dict.fromkeys(types)
    if given is None:
        own = {kind: _of_lists(fields, types.index(kind)) for kind in kinds}
        if FULL in own and (scaling := fields.object("rope_scaling")) is not None:
            own[FULL] |= scaling.raw
        # Beside lists, of which transformers makes its objects, the field of all layers has no effect.
        fields = fields.without("partial_rotary_factor").with_values({"rope_parameters": own})
    elif missing := [kind for kind in kinds if not isinstance(given.raw.get(kind), dict)]:
        raise fields.refuse("rope_parameters", f"transformers reads it if it has an object of {missing[0]}, too")
    fields, head_dim = fields.without("rope_scaling"), reading.heads(fields).head_dim
    inner = fields.without("rope_theta").with_defaults({"partial_rotary_factor": 1.0})
    return {kind: rotary.rope_of_type(inner, head_dim, rotary.whole_rope(fields, kind, {})) for kind in kinds}


def _of_lists(fields: ConfigJson, layer: int) -> dict[str, Any]:
    """The rope of a layer by fields of numbers, or lists of them."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    for name, own in zip(_ROPE_LISTS, ("rope_theta", "partial_rotary_factor"), strict=True):
        if not (given := fields.raw.get(name)) and not isinstance(given, int):
            continue
        if isinstance(given, list):
            if (numbers := fields.numbers(name)) and len(numbers) != fields.integer("num_hidden_layers"):
                raise fields.refuse(name, "a number for each layer is needed")
            found[own] = numbers[layer]
        elif own == name:
            found[own] = fields.number(name)
        else:
            raise fields.refuse(name, "a list of a number for each layer is needed")
    return found


_TOWER = ("vision_model.", "model.vision_model.", "vit_large_projector.", "model.multi_modal_projector.")
_NAMES = TensorNames(
    prefixes=("model.language_model.",),
    names={**LLAMA_NORMS, **SHARED_EXPERTS},
    left_out=_TOWER,
)
_PUBLISHED = TensorNames(
    prefixes=("model.",),
    names={
        **LLAMA_NORMS,
        **gated_names("mlp.shared_expert", "share_expert"),
        "mlp.gate": "moe.gate",
        CORRECTION: "moe.router_bias",
    },
    stacked_experts={f"moe.{each}.weight": (each,) for each in LETTERS},
    left_out=_TOWER,
)
STEP_3_7 = Family(
    "Step 3.7 (text)",
    ("Step3p7ForConditionalGeneration",),
    _read,
    Defaults("Step3p7TextConfig", {"num_nextn_predict_layers": 0, "num_local_experts": UNREAD}),
    replace(_NAMES, published=(_PUBLISHED,)),
    notes="text only; draft layers after the last are left out",
    nulls=(*_LIMITS, "num_sliding_attention_heads", "query_pre_attn_scalar", "moe_layers_enum", "per_layer_config"),
)
