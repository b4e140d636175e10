"""GPT-2, GPT-Neo and StarCoder 1: learned positions, LayerNorm, and a feed-forward part without a gate.

GPT-2's matrices are stored with inputs first, and q, k and v are one of them. Of GPT-Neo, scores have no factor, and
every other layer has a window. StarCoder 1 (GPT-BigCode) has one head of keys and values.

Tests: tests/core/test_families.py, tests/core/paths
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import Norms
from ..specs.positions import PositionTable
from ..specs.tensor_names import QKV, TensorNames
from . import reading, rotary
from .defaults import TOKENS, Defaults

SIZES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Names of sizes → GPT-2's, which older families of the kind have, too."""

_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_SIZES_OF_NEO = {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}


def sizes(fields: ConfigJson, names: Mapping[str, str] = SIZES, inner: str = "n_inner") -> ConfigJson:
    """The fields under the usual names. inner: the field of the feed-forward part's width. Without a value, the width
    is four times `hidden_size`.
    """
    fields = alone(reading.renamed(fields, names))
    width = fields.optional(inner) or 4 * fields.integer("hidden_size")
    return fields.with_values({"intermediate_size": width})


def alone(fields: ConfigJson) -> ConfigJson:
    """The fields without those of other families that transformers leaves out, too."""
    return fields.without("num_key_value_heads").without("head_dim")


def positions(fields: ConfigJson, **options: Any) -> PositionTable:
    """options: of the table."""
    return PositionTable(fields.integer("max_position_embeddings"), **options)


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("add_cross_attention"):
        raise fields.refuse("add_cross_attention", "a decoder beside an encoder is not supported")
    return _model(fields, kv_heads=0, by_layer=fields.boolean("scale_attn_by_inverse_layer_idx"))


def _read_first(fields: ConfigJson) -> ModelConfig:
    """OpenAI GPT: the norm behind the last layer's feed-forward part is the model's."""
    name, names = "activation_function", {"relu": "relu", "gelu": "gelu_new"}
    if (activation := fields.text("afn")) not in names:
        raise fields.refuse("afn", f"not supported; supported: {', '.join(names)}")
    found = _model(fields.without("n_inner").with_values({name: names[activation]}), kv_heads=0)
    *layers, last = (replace(layer, norms=Norms.BEHIND) for layer in found.layers)
    layers.append(replace(last, norms=Norms.BEHIND_MIXER))
    tensors = replace(_FIRST_NAMES, norm=f"h.{len(layers) - 1}.ln_2")
    return replace(found, layers=tuple(layers), tensors=tensors)


def _read_bigcode(fields: ConfigJson) -> ModelConfig:
    one = fields.boolean("multi_query")
    found = _model(fields, kv_heads=int(one))
    return found if one else replace(found, tensors=replace(_BIGCODE_NAMES, by_unit=("attn.c_attn",)))


def _model(fields: ConfigJson, kv_heads: int, *, by_layer: bool = False) -> ModelConfig:
    """kv_heads: 0: as many as query heads. by_layer: scores are divided by a layer's number, too, from 1 on."""
    fields = sizes(fields)
    own = fields.with_values({"num_key_value_heads": kv_heads} if kv_heads else {})
    attention = rotary.attention(own, rope=None, bias=True)
    factor = attention.scale if fields.boolean("scale_attn_weights") else 1.0
    scales = (factor / (at + 1) if by_layer else factor for at in range(fields.integer("num_hidden_layers")))
    mixers = [replace(attention, scale=each) for each in scales]
    return _with_positions(fields, mixers)


def _read_neo(fields: ConfigJson) -> ModelConfig:
    fields = sizes(fields, _SIZES_OF_NEO, "intermediate_size")
    plain = rotary.attention(fields, scale=1.0, rope=None, qkv_bias=False, o_bias=True)
    local = replace(plain, window=fields.integer("window_size"))
    return _with_positions(fields, [local if each else plain for each in _has_window(fields)])


def _with_positions(fields: ConfigJson, mixers: list[AttentionSpec]) -> ModelConfig:
    feed_forward = reading.ungated(fields, "activation_function", default=UngatedActivation.GELU_TANH, bias=True)
    norm = reading.layer_norm(fields, "layer_norm_epsilon")
    return reading.decoder(fields, mixers, feed_forward, norm, position_table=positions(fields))


def _has_window(fields: ConfigJson) -> list[bool]:
    """Which layers have a window. `attention_types` says it in runs, such as `[[["global", "local"], 12]]`."""
    count, runs = fields.integer("num_hidden_layers"), fields.raw.get("attention_types") or [[["global", "local"], 12]]
    try:
        kinds = [kind for some, times in runs for kind in [*some] * min(times, count + 1)]
    except (TypeError, ValueError):
        raise fields.refuse("attention_types", "a list of pairs is needed: kinds of layers, and how often") from None
    if unknown := {*map(str, kinds)} - {"global", "local"}:
        raise fields.refuse("attention_types", f"{min(unknown)} is not supported; supported: global, local")
    if len(kinds) != count:
        raise fields.refuse("attention_types", f"{len(kinds)} kinds for num_layers, {count}")
    return [kind == "local" for kind in kinds]


#: GPT-2's names around layers.
TENSORS = TensorNames(prefixes=("transformer.", ""), norm="ln_f", embeddings="wte", layers="h")
_NAMES = replace(
    TENSORS,
    positions="wpe",
    inputs_first=True,
    names={
        **_NORMS,
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    fused={"attn.c_attn": QKV},
)
_BIGCODE_NAMES = replace(_NAMES, inputs_first=False)

_FIRST_NAMES = replace(
    _NAMES,
    embeddings="tokens_embed",
    positions="positions_embed",
    names={**_NAMES.names, "attention_out_norm": "ln_1", "mlp_out_norm": "ln_2"},
)

GPT_1 = Family(
    "OpenAI GPT",
    ("OpenAIGPTLMHeadModel",),
    _read_first,
    Defaults("OpenAIGPTConfig", {"max_position_embeddings": 512, "scale_attn_weights": True}),
    _FIRST_NAMES,
)
GPT_2 = Family(
    "GPT-2",
    ("GPT2LMHeadModel",),
    _read,
    Defaults("GPT2Config", {"max_position_embeddings": 1024}, takes=TOKENS),
    _NAMES,
    nulls=("n_inner",),
)
GPT_BIGCODE = Family(
    "StarCoder 1 (GPT-BigCode)",
    ("GPTBigCodeForCausalLM",),
    _read_bigcode,
    Defaults("GPTBigCodeConfig", {"max_position_embeddings": 1024}, takes=TOKENS),
    _BIGCODE_NAMES,
    nulls=("n_inner",),
)
GPT_NEO = Family(
    "GPT-Neo",
    ("GPTNeoForCausalLM",),
    _read_neo,
    Defaults("GPTNeoConfig", takes=TOKENS),
    replace(
        _BIGCODE_NAMES,
        names={
            **_NAMES.names,
            **{part: part.replace("self_attn", "attn.attention") for part in QKV},
            "self_attn.o_proj": "attn.attention.out_proj",
        },
        fused={},
    ),
    nulls=("intermediate_size", "attention_types"),
)
