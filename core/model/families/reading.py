"""Readers that families share: each reads some fields of `config.json` into values of `layers`.

Tests: tests/core/test_families.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson, UnsupportedModel
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.feed_forward import (
    Activation,
    ClampedSwiglu,
    Experts,
    GatedSpec,
    Routing,
    Scoring,
    UngatedActivation,
    UngatedSpec,
)
from ..specs.layers import LayerSpec
from ..specs.norms import NormKind, Norms, NormSpec
from ..specs.recurrent import RecurrentSpec

DTYPES = ("float32", "bfloat16", "float16")
LATENTS_NOTE = "the KV cache holds latents, not keys and values"
ON_OPERATORS = "on CPUs by PyTorch's operators"
INDEXER_NOTE = f"{LATENTS_NOTE}, and keys of the indexer that chooses tokens"
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
    if not head_dim:
        raise fields.refuse("hidden_size", f"num_attention_heads is {count}; a head must have elements")
    if head_dim % 2:
        raise UnsupportedModel(f"{fields.path}: head_dim is {head_dim}; rotary embedding needs an even one")
    return Heads(count, kv_heads, head_dim)


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


def check_silu(fields: ConfigJson, mixer: str) -> None:
    """Refuse other activations. mixer: its name for users."""
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.refuse("hidden_act", f"{mixer} is supported with silu alone, not with {activation}")


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
    return NormSpec(found, NormKind.BIASED_LAYER, one_plus=one_plus, wide=True)


#: Names of the number of experts; transformers writes any of them.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts(
    fields: ConfigJson,
    routing: Routing,
    *,
    size: str = "moe_intermediate_size",
    per_token: str = "num_experts_per_tok",
    shared: int | str = 0,
    activation: ClampedSwiglu | UngatedActivation | None = None,
    kind: type[Experts] = Experts,
    **options: Any,
) -> Experts:
    """routing: its `per_token` is replaced by the field's. shared: width of the shared expert, or the field of the
    number of experts that make it. activation: None: the field's. options: further fields of this kind of mixtures.
    """
    shared_size = number_of(fields, shared) * fields.integer(size) if isinstance(shared, str) else shared
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
    return kind(
        count, fields.integer(size), routing, activation or _activation(fields, "hidden_act"), shared_size, **options
    )


def expert_groups(fields: ConfigJson) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may choose from."""
    groups, kept = fields.integer("n_group"), fields.integer("topk_group")
    if kept > groups:
        raise fields.refuse("topk_group", f"n_group is {groups}; it can't be more than that")
    return groups, kept


def sigmoid_routing(fields: ConfigJson, factor: str = "", epsilon: float = 0.0) -> Routing:
    """Sigmoids with a learned correction, whose weights are divided by their sum. factor: the field of theirs."""
    scale = fields.number(factor) if factor else 1.0
    return Routing(1, Scoring.SIGMOID, renormalised=True, epsilon=epsilon, factor=scale, corrected=True)


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


def mlp_layer_types(fields: ConfigJson, first_dense: int | None = None) -> list[bool]:
    """Which layers have experts, by `mlp_layer_types`; by default all after the first `first_dense`. None: as many as
    `first_k_dense_replace` says.
    """
    first = number_of(fields, "first_k_dense_replace") if first_dense is None else first_dense
    types = fields.texts("mlp_layer_types")
    if not types:
        return [index >= first for index in range(fields.integer("num_hidden_layers"))]
    return [kind == "sparse" for kind in checked_types(fields, types, ("dense", "sparse"), "mlp_layer_types")]


def sparse_layers(fields: ConfigJson) -> list[bool]:
    """Which layers have experts, by `decoder_sparse_step` and `mlp_only_layers`, as of Qwen's models."""
    step, dense = fields.integer("decoder_sparse_step"), fields.indices("mlp_only_layers")
    return [at not in dense and (at + 1) % step == 0 for at in range(fields.integer("num_hidden_layers"))]


def rms_norm(fields: ConfigJson, *, one_plus: bool = False, wide: bool = False) -> NormSpec:
    return NormSpec(
        fields.number("rms_norm_eps", None if fields.has("rms_norm_eps") else 1e-6),
        one_plus=one_plus,
        wide=wide or one_plus,
    )


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
    """Return which of several names of a field the file has; the first if it has none.

    Raises UnsupportedModel if it has several with different values.
    """
    given = [name for name in names if name in fields.raw]
    if different := [name for name in given if fields.raw[name] != fields.raw[given[0]]]:
        raise fields.refuse(different[0], f"it is another name of {given[0]}, whose value differs; give one of them")
    return (given or names)[0]


def layer_types(
    fields: ConfigJson, default: int | Sequence[str] = 1, other: str = SLIDING, full: str = FULL
) -> list[str]:
    """`layer_types`. default: where it is missing; a number: full attention in every so many layers, and `other` in the
    others. full: what a family calls the former, which may have the usual name, too.
    """
    if fields.is_missing("layer_types"):
        if not isinstance(default, int):
            return [*default]
        return [other if (index + 1) % default else full for index in range(fields.integer("num_hidden_layers"))]
    types = [full if kind == FULL else kind for kind in fields.texts("layer_types")]
    return checked_types(fields, types, (full, other))


def checked_types(fields: ConfigJson, types: list[str], known: Collection[str], name: str = "layer_types") -> list[str]:
    """Types of all layers, after a check. known: those that there are. name: the field that has them."""
    if unknown := sorted(set(types) - set(known)):
        raise fields.refuse(name, f"{unknown[0]} is not supported; supported: {', '.join(known)}")
    if len(types) != (count := fields.integer("num_hidden_layers")):
        raise fields.refuse(name, f"{len(types)} types for num_hidden_layers, {count}")
    return types


def fields_by_layer(fields: ConfigJson, count: int, known: Sequence[str]) -> list[ConfigJson]:
    """What `per_layer_config` has of each of `count` layers: known fields whose values are not the whole model's.
    Numbers of layers may be filled with zeros, as transformers does from the tenth layer on.
    """
    name = "per_layer_config"
    given = fields.object(name) or fields.part(name, {})
    layers = {int(key) if key.isdecimal() else key: key for key in given.raw}
    if others := [key for layer, key in layers.items() if layer not in range(count)]:
        raise fields.refuse(name, f"{others[0]!r} is none of {count} layers")
    keys = (layers.get(layer, str(layer)) for layer in range(count))
    found = [given.object(key) or given.part(key, {}) for key in keys]
    for own in found:
        if others := sorted(own.raw.keys() - {*known}):
            raise own.refuse(others[0], f"layers may differ in {', '.join(known)} alone")
    return found


def decoder(
    fields: ConfigJson,
    mixer: AttentionSpec | RecurrentSpec | Sequence[AttentionSpec | RecurrentSpec],
    feed_forward: GatedSpec | UngatedSpec | Experts | None,
    norm: NormSpec | None = None,
    *,
    has_experts: Sequence[bool] = (),
    norms: Norms = Norms.BEFORE,
    kind: Callable[..., LayerSpec] = DecoderLayer,
    **others: Any,
) -> ModelConfig:
    """Return a model whose layers have one feed-forward part.

    mixer: of all layers, or of each. norm: None: RMSNorm. has_experts: layers that have it, where others have a dense
    part. kind: makes a layer of its mixer, part and norms. others: fields of the model.
    """
    count = fields.integer("num_hidden_layers")
    mixers = mixer if isinstance(mixer, Sequence) else [mixer] * count
    plain = feed_forward if all(has_experts) else gated(fields)
    parts = [feed_forward if it else plain for it in has_experts] or [feed_forward] * len(mixers)
    layers = [kind(each, part, norms) for each, part in zip(mixers, parts, strict=True)]
    return dense(fields, layers, norm or rms_norm(fields), **others)


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
