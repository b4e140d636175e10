"""Readers that families share: each reads some fields of `config.json` into values of `layers`.

Tests: tests/core/test_families.py, tests/core/model/test_model_config.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ..config import ModelConfig
from ..config_json import ConfigJson, UnsupportedModel
from ..layers import (
    Activation,
    AttentionSpec,
    ClampedSwiglu,
    Experts,
    GatedSpec,
    LayerSpec,
    NormSpec,
    Routing,
    Scoring,
    UngatedActivation,
    UngatedSpec,
)
from ..recurrent import RecurrentSpec
from ..rope_config import ROPE_TYPES, RopeConfig

DTYPES = ("float32", "bfloat16", "float16")
EXPERTS_NOTE = "on CPUs mixtures by the native library, the rest by PyTorch's operators"
FULL, SLIDING = "full_attention", "sliding_attention"


class Heads(NamedTuple):
    """Numbers of heads and their size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def heads(fields: ConfigJson) -> Heads:
    """Absent, `num_key_value_heads` takes the family's default; null or without one it is as many as query heads."""
    hidden, count = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or count
    if count % kv_heads:
        raise fields.refuse("num_key_value_heads", f"num_attention_heads, {count}, must be a multiple of it")
    has_own = fields.has("head_dim") and not fields.is_null("head_dim")
    head_dim = fields.integer("head_dim", least=2) if has_own else hidden // count
    if head_dim % 2:
        raise UnsupportedModel(f"{fields.path}: head_dim is {head_dim}; rotary embedding needs an even one")
    return Heads(count, kv_heads, head_dim)


def attention(fields: ConfigJson, **options: Any) -> AttentionSpec:
    """Attention as most models have it: rope, and `attention_bias` on all projections. options: of `AttentionSpec`."""
    own, bias = heads(fields), fields.boolean("attention_bias")
    turned = rope(fields, own.head_dim)
    return AttentionSpec(*own, scale=own.head_dim**-0.5, rope=turned, qkv_bias=bias, o_bias=bias, **options)


def windows(fields: ConfigJson, types: Sequence[str]) -> list[int | None]:
    """The window of each layer, by the field `layer_types`; where it is missing, by `types`."""
    window, given = fields.optional("sliding_window"), fields.texts("layer_types") and layer_types(fields, 1)
    return [window if kind == SLIDING else None for kind in given or types]


def windows_of(fields: ConfigJson, types: Sequence[str]) -> list[int | None]:
    """The window of each layer of these types."""
    return [checked_window(fields, types) if kind == SLIDING else None for kind in types]


def checked_window(fields: ConfigJson, types: Sequence[str]) -> int | None:
    """The window of layers that have one, which is needed where one of these types does."""
    window = fields.optional("sliding_window")
    if window is None and SLIDING in types:
        raise fields.refuse("sliding_window", f"layers of {SLIDING} need one")
    return window


def gated(
    fields: ConfigJson, name: str = "hidden_act", *, bias: bool = False, size: str = "intermediate_size"
) -> GatedSpec:
    """name: the field of the activation."""
    return GatedSpec(fields.integer(size), _activation(fields, name), bias)


def _activation(fields: ConfigJson, name: str) -> Activation:
    activation = fields.text(name, None if fields.has(name) else "silu")
    if activation not in list(Activation):
        raise fields.refuse(name, f"not supported; supported: {', '.join(Activation)}")
    return Activation(activation)


def ungated(
    fields: ConfigJson, name: str = "hidden_act", *, default: UngatedActivation, bias: bool = False
) -> UngatedSpec:
    """name: the field of the activation. default: the activation where the field is missing."""
    activation = fields.text(name, None if fields.has(name) else default)
    activation = UngatedActivation.GELU_TANH if activation in _GELU_TANH else activation
    if activation not in list(UngatedActivation):
        raise fields.refuse(name, f"not supported; supported: {', '.join(UngatedActivation)}")
    return UngatedSpec(fields.integer("intermediate_size"), UngatedActivation(activation), bias)


#: Other names of one activation.
_GELU_TANH = ("gelu_new", "gelu_fast")


def layer_norm(fields: ConfigJson, eps: str, *, one_plus: bool = False) -> NormSpec:
    """LayerNorm with a bias. eps: the field of it, 1e-5 where it is missing."""
    found = fields.number(eps, None if fields.has(eps) else 1e-5)
    return NormSpec(found, centered=True, one_plus=one_plus, wide=True, biased=True)


#: Names of the number of experts; transformers writes any of them.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts(
    fields: ConfigJson,
    routing: Routing,
    *,
    size: str = "moe_intermediate_size",
    per_token: str = "num_experts_per_tok",
    shared_size: int = 0,
    activation: ClampedSwiglu | UngatedActivation | None = None,
    **options: Any,
) -> Experts:
    """routing: its `per_token` is replaced by the field's. activation: None: the field's. options: further fields of
    `Experts`.
    """
    name = next((each for each in _COUNTS if each in fields.raw), None)
    name = name or next((each for each in _COUNTS if fields.has(each)), _COUNTS[0])
    count, chosen = fields.integer(name), fields.integer(per_token)
    if chosen > count:
        raise fields.refuse(per_token, f"{name} is {count}; it can't be more than that")
    if count % routing.groups:
        raise fields.refuse("n_group", f"{name}, {count}, is not divisible by it")
    if routing.groups > 1 and count // routing.groups < routing.group_best:
        raise fields.refuse("n_group", f"of {name}, {count}, a group must have at least {routing.group_best}")
    routing = replace(routing, per_token=chosen)
    return Experts(
        count, fields.integer(size), routing, activation or _activation(fields, "hidden_act"), shared_size, **options
    )


def expert_groups(fields: ConfigJson) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may choose from."""
    groups, kept = fields.integer("n_group"), fields.integer("topk_group")
    if kept > groups:
        raise fields.refuse("topk_group", f"n_group is {groups}; it can't be more than that")
    return groups, kept


def routing_in_groups(fields: ConfigJson) -> Routing:
    """DeepSeek-V3's router: sigmoids with a learned correction, of experts in groups."""
    groups, kept = expert_groups(fields)
    return Routing(
        1,
        Scoring.SIGMOID,
        renormalised=fields.boolean("norm_topk_prob"),
        epsilon=1e-20,
        factor=fields.number("routed_scaling_factor"),
        corrected=True,
        groups=groups,
        kept_groups=kept,
    )


def mlp_layer_types(fields: ConfigJson, first_dense: int) -> list[bool]:
    """Which layers have experts, by `mlp_layer_types`; by default all after the first `first_dense`."""
    count, types = fields.integer("num_hidden_layers"), fields.texts("mlp_layer_types")
    if not types:
        return [index >= first_dense for index in range(count)]
    if unknown := sorted(set(types) - {"dense", "sparse"}):
        raise fields.refuse("mlp_layer_types", f"{unknown[0]} is not supported; supported: dense, sparse")
    if len(types) != count:
        raise fields.refuse("mlp_layer_types", f"{len(types)} types for num_hidden_layers, {count}")
    return [kind == "sparse" for kind in types]


def rms_norm(fields: ConfigJson, *, one_plus: bool = False, wide: bool = False) -> NormSpec:
    return NormSpec(
        fields.number("rms_norm_eps", None if fields.has("rms_norm_eps") else 1e-6),
        one_plus=one_plus,
        wide=wide or one_plus,
    )


def rope(
    fields: ConfigJson,
    head_dim: int,
    *,
    of: ConfigJson | None = None,
    theta: float | None = None,
    interleaved: bool = False,
    names: Mapping[str, str] = MappingProxyType({}),
    types: Sequence[str] = ROPE_TYPES,
) -> RopeConfig:
    """The rotary embedding, from `rope_parameters` or the older `rope_scaling` and `rope_theta`. A part of each head
    rotates in families whose defaults state `partial_rotary_factor`.

    of: the scaling, where layers have several. theta: where the scaling names none; None: the fields' own. names: older
    names of types, which transformers knows for this family. types: those that it supports.
    """
    scaling = of or rope_fields(fields)
    if nested := [name for name, value in scaling.raw.items() if isinstance(value, dict)]:
        raise scaling.refuse(nested[0], "rotary embeddings that differ between layers are not supported here")
    rope_type = names.get(name := rope_type_of(scaling), name)
    if rope_type not in types:
        raise scaling.refuse(_type_field(scaling), f"rope type not supported; supported: {', '.join(types)}")
    base = theta if theta is not None and "rope_theta" not in scaling.raw else _theta(scaling, fields)
    share = _share(scaling, fields, rope_type)
    dim = head_dim if rope_type == "proportional" else int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2 or share > 1:
        raise fields.refuse("partial_rotary_factor", f"it makes {dim} of {head_dim} elements of a head rotate")
    values: dict[str, Any] = {"theta": base, "type": rope_type, "interleaved": interleaved}
    if rope_type == "proportional":
        return RopeConfig(
            dim,
            pairs=int(share * head_dim // 2),
            factor=_factor(scaling, "factor", None if "factor" in scaling.raw else 1.0),
            **values,
        )
    return RopeConfig(dim, **values, **_scaling(scaling, fields, rope_type, dim))


def check_rotated_norm(fields: ConfigJson, rope: RopeConfig) -> None:
    """Refuse ropes that change norms, of a family that normalises heads after they are rotated."""
    if rope.attention_factor != 1:
        scaling = rope_fields(fields)
        why = "rotated heads would have other norms; only attention_factor 1 is supported"
        raise scaling.refuse(_type_field(scaling), why)


def check_sections(fields: ConfigJson, rope: RopeConfig, default: tuple[int, ...]) -> None:
    """Refuse sections of M-RoPE that don't fill the rotated elements; transformers splits them by these. For text alone
    their sizes have no effect. default: where `mrope_section` is missing.
    """
    scaling = rope_fields(fields)
    sections = scaling.indices("mrope_section") or default
    if sum(sections) != rope.dim // 2:
        why = f"its sum must be {rope.dim // 2}, half of the elements that rotate"
        raise scaling.refuse("mrope_section", f"{why}; by default it is {list(default)}")


def rope_type_of(scaling: ConfigJson) -> str:
    return scaling.text(_type_field(scaling), "default")


def _type_field(scaling: ConfigJson) -> str:
    return "rope_type" if "rope_type" in scaling.raw else "type"


def _theta(scaling: ConfigJson, fields: ConfigJson) -> float:
    holder = scaling if "rope_theta" in scaling.raw else fields
    return holder.number("rope_theta", None if holder.has("rope_theta") else 10000.0)


def _share(scaling: ConfigJson, fields: ConfigJson, rope_type: str) -> float:
    """The part of a head that rotates."""
    name = "partial_rotary_factor"
    if rope_type != "proportional" and not fields.states(name, 1):
        scaling.states(name, 1)
        if rope_type == "default":
            return 1.0
    if name in scaling.raw:
        return scaling.number(name)
    is_stated = fields.states(name, 1)
    return fields.number(name) if is_stated and fields.has(name) else 1.0


def ropes_by_type(fields: ConfigJson, thetas: Mapping[str, tuple[str | None, float]]) -> dict[str, RopeConfig]:
    """A rope for each type of layer: `rope_parameters` has an object for each. The older `rope_scaling` changes that of
    layers with full attention.

    thetas: by type, the field of a base where its object names none, and the base where that field is missing.
    """
    head_dim, parameters = heads(fields).head_dim, fields.object("rope_parameters")
    fields = fields.without(_ORIGINAL)
    scaling, found = fields.object("rope_scaling"), {}
    for kind, (name, theta) in thetas.items():
        of = None if parameters is None else parameters.object(kind)
        if kind == FULL and scaling is not None:
            if of is None and not fields.is_missing("rope_parameters"):
                raise fields.refuse("rope_scaling", f"rope_parameters has no {FULL} that it could change")
            of = scaling if of is None else of.with_values(scaling.raw)
        of = _of_type(of or fields.part(f"rope_parameters.{kind}", {}))
        is_outer = name in fields.raw and "rope_theta" not in of.raw
        found[kind] = rope(fields, head_dim, of=of, theta=fields.number(str(name)) if is_outer else theta)
    return found


def whole_rope(fields: ConfigJson, kind: str, ropes: Mapping[str, Any]) -> ConfigJson:
    """The object of a type of layer in `rope_parameters`, whose fields are all there: no other field completes it.

    ropes: objects by type, where `rope_parameters` is missing.
    """
    is_missing = fields.is_missing("rope_parameters")
    parameters = fields.part("rope_parameters", dict(ropes)) if is_missing else fields.object("rope_parameters")
    if (of := parameters and parameters.object(kind)) is None:
        raise fields.refuse("rope_parameters", f"{kind} layers need an object of that name in it")
    if "rope_theta" not in of.raw:
        raise of.refuse("rope_theta", "transformers has no default of it here")
    if "rope_scaling" in fields.raw:
        raise fields.refuse("rope_scaling", "it has no older names here; leave it out, and set rope_parameters")
    return _of_type(of)


def _of_type(scaling: ConfigJson) -> ConfigJson:
    """The rope of a type of layer, after a check: transformers reads one field of the whole `rope_parameters`."""
    if not scaling.boolean("truncate", True):
        raise scaling.refuse("truncate", "transformers leaves it out of ropes by type; only true is supported")
    return scaling


def optional_number(fields: ConfigJson, name: str) -> float | None:
    """A number above 0; None where the field is null, or is missing without a default."""
    return fields.number(name) if fields.has(name) and not fields.is_null(name) else None


def softcap(fields: ConfigJson, name: str) -> float | None:
    """A soft cap, which some families of a kind have: those whose defaults state it."""
    return optional_number(fields, name) if fields.states(name) else None


def number_of(fields: ConfigJson, name: str) -> int:
    """A whole number of at least 0; 0 where the field is missing without a default."""
    return fields.integer(name, None if fields.has(name) else 0, least=0)


def renamed(fields: ConfigJson, names: Mapping[str, str]) -> ConfigJson:
    """The fields with others' values where they are missing. names: a field → the other. Raises UnsupportedModel where
    both are there, and differ.
    """
    for name, other in names.items():
        one_of(fields, other, name)
    found = {name: fields.raw[other] for name, other in names.items() if other in fields.raw and name not in fields.raw}
    return fields.with_values(found)


def one_of(fields: ConfigJson, *names: str) -> str:
    """The name of a field with several: the one that is there; the first where none is. Raises UnsupportedModel for
    several with different values, of which transformers takes either.
    """
    given = [name for name in names if name in fields.raw]
    if different := [name for name in given if fields.raw[name] != fields.raw[given[0]]]:
        raise fields.refuse(different[0], f"it is another name of {given[0]}, whose value differs; give one of them")
    return (given or names)[0]


def rope_fields(fields: ConfigJson) -> ConfigJson:
    """The object that describes rotary embeddings; empty where there is none."""
    found = fields.object("rope_scaling") or fields.object("rope_parameters")
    return found or fields.part("rope_parameters", {})


def _scaling(scaling: ConfigJson, fields: ConfigJson, rope_type: str, dim: int) -> dict[str, Any]:
    """The fields of RopeConfig that only some types have."""
    if rope_type == "dynamic":  # it begins after a request's last possible position
        _factor(scaling, "factor")
    if rope_type in ("default", "dynamic"):
        return {}
    if rope_type == "linear":
        return {"factor": _factor(scaling, "factor")}
    positions, original = fields.integer(_POSITIONS), original_positions(scaling, fields)
    found: dict[str, Any] = {_ORIGINAL: original}
    if rope_type == "llama3":
        found |= {each: _factor(scaling, each) for each in ("factor", "low_freq_factor", "high_freq_factor")}
        if found["high_freq_factor"] < found["low_freq_factor"]:
            raise scaling.refuse(
                "high_freq_factor", f"it must not be below low_freq_factor, {found['low_freq_factor']}"
            )
        return found
    if rope_type == "yarn" and "factor" not in scaling.raw:
        raise scaling.refuse("factor", "yarn needs it: a number, or null for positions / original positions")
    factor = positions / original if scaling.is_missing("factor") else _factor(scaling, "factor")
    return found | (_longrope(scaling, factor, original, dim) if rope_type == "longrope" else _yarn(scaling, factor))


_ORIGINAL = "original_max_position_embeddings"

#: No model stretches positions, or scales what it does, by as much.
_MOST = 1e6


def original_positions(scaling: ConfigJson, fields: ConfigJson) -> int:
    """The positions that a model was trained for before they were stretched: a field of the model comes first."""
    is_outer = _ORIGINAL in fields.raw or fields.has(_ORIGINAL)
    return fields.integer(_ORIGINAL) if is_outer else scaling.integer(_ORIGINAL, fields.integer(_POSITIONS))


_POSITIONS = "max_position_embeddings"


def _factor(scaling: ConfigJson, name: str, default: float | None = None) -> float:
    value = scaling.number(name, default)
    if not 1 / _MOST <= value <= _MOST:
        raise scaling.refuse(name, f"a number from {1 / _MOST:g} to {_MOST:g} is needed")
    return value


def _longrope(scaling: ConfigJson, factor: float, original: int, dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        factors = found[f"{name}s"] = scaling.numbers(name)
        if len(factors) != dim // 2:
            raise scaling.refuse(name, f"{len(factors)} factors, one is needed for each of {dim // 2} frequencies")
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {**found, "attention_factor": _factor(scaling, "attention_factor", default)}


def _yarn(scaling: ConfigJson, factor: float) -> dict[str, Any]:
    default = mscale(factor, 1.0)
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        default = mscale(factor, _factor(scaling, "mscale")) / mscale(factor, _factor(scaling, "mscale_all_dim"))
    return {
        "factor": factor,
        **{each: _factor(scaling, each) for each in ("beta_fast", "beta_slow") if scaling.has(each)},
        "attention_factor": _factor(scaling, "attention_factor", default),
        "truncate": scaling.boolean("truncate", True),
    }


def mscale(factor: float, mscale: float) -> float:
    """YaRN's factor of cos and sin, or of the square root of scores."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def layer_types(fields: ConfigJson, pattern: int, other: str = SLIDING) -> list[str]:
    """`layer_types`, or by default full attention in every `pattern`-th layer and `other` in the others."""
    count, types = fields.integer("num_hidden_layers"), fields.texts("layer_types")
    if fields.is_missing("layer_types"):
        return [other if (index + 1) % pattern else FULL for index in range(count)]
    if unknown := sorted(set(types) - {FULL, other}):
        raise fields.refuse("layer_types", f"{unknown[0]} is not supported; supported: {FULL}, {other}")
    if len(types) != count:
        raise fields.refuse("layer_types", f"{len(types)} types for num_hidden_layers, {count}")
    return types


def layers_with_experts(
    fields: ConfigJson,
    mixers: Sequence[AttentionSpec | RecurrentSpec],
    experts: Experts,
    has_experts: Sequence[bool],
) -> list[LayerSpec]:
    """Layers with these mixers, some of them with experts and the others with a dense part."""
    plain = experts if all(has_experts) else gated(fields)
    return [LayerSpec(each, experts if it else plain) for each, it in zip(mixers, has_experts, strict=True)]


def dense(fields: ConfigJson, layers: Sequence[LayerSpec], norm: NormSpec, **others: Any) -> ModelConfig:
    """Return a model of these layers; everything else is read from fields that all families share."""
    return ModelConfig(
        architecture="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=tuple(layers),
        norm=norm,
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=fields.token_ids("eos_token_id"),
        **{
            "max_position_embeddings": fields.integer("max_position_embeddings"),
            "tie_word_embeddings": fields.boolean("tie_word_embeddings"),
            **others,
        },
    )


def _dtype(fields: ConfigJson) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(name, None if fields.has(name) else "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.refuse(name, f"not supported; supported: {', '.join(DTYPES)}")
    return dtype
