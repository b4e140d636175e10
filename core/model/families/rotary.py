"""Rotary embeddings as `config.json` describes them: readers that families share.

Tests: tests/core/test_families.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.rope_config import ROPE_TYPES, RopeConfig
from . import reading


def attention(
    fields: ConfigJson,
    *,
    bias: bool | None = None,
    interleaved: bool = False,
    adjust: Callable[[ConfigJson, RopeConfig], RopeConfig] | None = None,
    **options: Any,
) -> AttentionSpec:
    """Attention as most models have it: a rope, scores divided by the root of a head's size, and biases of all
    projections or of none.

    bias: None: `attention_bias` says it. interleaved: see `RopeConfig`. adjust: checks the rope or changes it, such
    as by axes. options: of `AttentionSpec`, in place of these; with `qkv_bias`, the output has no bias but by `o_bias`.
    """
    own = reading.heads(fields)
    if "rope" not in options:
        turned = rope(fields, own.head_dim, interleaved=interleaved)
        options["rope"] = turned if adjust is None else adjust(fields, turned)
    if "qkv_bias" not in options:
        options["qkv_bias"] = options["o_bias"] = fields.boolean("attention_bias") if bias is None else bias
    return AttentionSpec(*own, **{"scale": own.head_dim**-0.5, **options})


def of_types(
    fields: ConfigJson,
    mixer: AttentionSpec,
    types: Sequence[str],
    ropes: Mapping[str, RopeConfig | None] | None = None,
) -> list[AttentionSpec]:
    """Attention of layers of these types, some with a window. ropes: of each type; None: all have the mixer's."""
    windows = zip(types, reading.windows_of(fields, types), strict=True)
    return [replace(mixer, rope=ropes[kind] if ropes else mixer.rope, window=window) for kind, window in windows]


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
    if base == 1 and rope_type == "yarn":
        raise _with_theta(scaling, fields).refuse(
            "rope_theta", "yarn divides by its logarithm; a number other than 1 is needed"
        )
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


def rope_of_type(fields: ConfigJson, head_dim: int, of: ConfigJson, **options: Any) -> RopeConfig:
    """The rope of a type of layer. Unlike a rope of all layers, it is trained for the positions that its own object
    names, whatever stands beside. options: of `rope`.
    """
    return rope(fields.without(_ORIGINAL), head_dim, of=of, **options)


def check_rotated_norm(fields: ConfigJson, rope: RopeConfig) -> None:
    """Refuse ropes that change norms, of a family that normalises heads after they are rotated."""
    if rope.attention_factor != 1:
        scaling = rope_fields(fields)
        why = "rotated heads would have other norms; only attention_factor 1 is supported"
        raise scaling.refuse(_type_field(scaling), why)


def _sections(scaling: ConfigJson, default: tuple[int, ...]) -> tuple[int, ...]:
    if scaling.is_missing("mrope_section"):
        return default
    if not (found := scaling.indices("mrope_section")):
        raise scaling.refuse("mrope_section", "it has no section; leave the field out for its default")
    return found


def check_sections(fields: ConfigJson, rope: RopeConfig, default: tuple[int, ...]) -> None:
    """Refuse sections of M-RoPE that don't fill the rotated elements; transformers splits them by these. For text alone
    their sizes have no effect. default: where `mrope_section` is missing.
    """
    scaling = rope_fields(fields)
    sections = _sections(scaling, default)
    if sum(sections) != rope.dim // 2:
        why = f"its sum must be {rope.dim // 2}, half of the elements that rotate"
        raise scaling.refuse("mrope_section", f"{why}; by default it is {list(default)}")


def in_sections(fields: ConfigJson, rope: RopeConfig, default: tuple[int, ...]) -> RopeConfig:
    """The rope with axes of time, height and width, after a check: the frequencies of an axis' section lie in a row.

    default: see `check_sections`.
    """
    check_sections(fields, rope, default)
    sections = _sections(rope_fields(fields), default)
    return replace(rope, axes=tuple(index % 3 for index, count in enumerate(sections) for _ in range(count)))


def in_turns(fields: ConfigJson, rope: RopeConfig, default: tuple[int, int, int]) -> RopeConfig:
    """The rope with axes of time, height and width, which frequencies have in turn; as many of height and of width as
    their sections say, and the others are of time.
    """
    scaling = rope_fields(fields)
    sections = _sections(scaling, default)
    if len(sections) < 3:
        raise scaling.refuse("mrope_section", f"three sections are needed; by default they are {list(default)}")
    turns = ((place % 3, place // 3) for place in range(rope.dim // 2))
    return replace(rope, axes=tuple(axis if turn < sections[axis] else 0 for axis, turn in turns))


def in_pairs(fields: ConfigJson, rope: RopeConfig, default: tuple[int, int, int]) -> RopeConfig:
    """The rope with axes of time, height and width: frequencies are of height and of width in turn, and the last ones
    are of time. Their sections are as many of height, of width, and of time.
    """
    check_sections(fields, rope, default)
    sections = rope_fields(fields).indices("mrope_section") or default
    if len(sections) != 3 or sections[0] != sections[1] or not sections[2]:
        raise rope_fields(fields).refuse("mrope_section", "three sections are needed, the first two of one size")
    return replace(rope, axes=(1, 2) * sections[0] + (0,) * sections[2])


def rope_type_of(scaling: ConfigJson) -> str:
    return scaling.text(_type_field(scaling), "default")


def _type_field(scaling: ConfigJson) -> str:
    return "rope_type" if "rope_type" in scaling.raw else "type"


def _theta(scaling: ConfigJson, fields: ConfigJson) -> float:
    holder = _with_theta(scaling, fields)
    return holder.number("rope_theta", None if holder.has("rope_theta") else 10000.0)


def _with_theta(scaling: ConfigJson, fields: ConfigJson) -> ConfigJson:
    """The object that has the base."""
    return scaling if "rope_theta" in scaling.raw else fields


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
    head_dim, parameters = reading.heads(fields).head_dim, fields.object("rope_parameters")
    scaling, found = fields.object("rope_scaling"), {}
    for kind, (name, theta) in thetas.items():
        own = None if parameters is None else parameters.object(kind)
        if kind == reading.FULL and scaling is not None:
            if own is None and not fields.is_missing("rope_parameters"):
                raise fields.refuse("rope_scaling", f"rope_parameters has no {reading.FULL} that it could change")
            # The older field `type` has no effect: what is changed has a `rope_type`.
            own = scaling.with_values({"rope_type": "default"}) if own is None else own
            own = own.with_values(scaling.raw)
        own = _of_type(own or fields.part(f"rope_parameters.{kind}", {}))
        is_outer = name in fields.raw and "rope_theta" not in own.raw
        found[kind] = rope_of_type(fields, head_dim, own, theta=fields.number(str(name)) if is_outer else theta)
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
    check_original(of)
    return _of_type(of)


def whole_ropes(
    fields: ConfigJson, head_dim: int, types: Sequence[str], ropes: Mapping[str, Any]
) -> dict[str, RopeConfig]:
    """The rope of each of these types of layers. ropes: see `whole_rope`."""
    return {kind: rope_of_type(fields, head_dim, whole_rope(fields, kind, ropes)) for kind in dict.fromkeys(types)}


def check_original(scaling: ConfigJson) -> None:
    """Refuse a stretched rope without its original positions, where transformers has no default that the file says."""
    if rope_type_of(scaling) in ("llama3", "yarn", "longrope") and scaling.is_missing(_ORIGINAL):
        raise scaling.refuse(_ORIGINAL, "the positions that the rope was trained for are needed")


def _of_type(scaling: ConfigJson) -> ConfigJson:
    """The rope of a type of layer, after a check: transformers reads one field of the whole `rope_parameters`."""
    if not scaling.boolean("truncate", True):
        raise scaling.refuse("truncate", "transformers leaves it out of ropes by type; only true is supported")
    return scaling


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
    if rope_type == "longrope" and original == 1:
        holder = fields if _ORIGINAL in fields.raw else scaling
        raise holder.refuse(_ORIGINAL, "longrope divides by its logarithm; more than 1 is needed")
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
