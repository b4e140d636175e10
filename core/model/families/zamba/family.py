"""Zamba and Zamba 2: layers of Mamba. In some of them a block of attention and a feed-forward part comes before Mamba;
these layers share one or two blocks' weights.

A block reads the residual stream and the embeddings, side by side. Its output is added to the input of the layer's
mixer, not to the residual stream: see `ZambaLayer`. Each layer adds low-rank pairs of its own to the block's weights;
transformers lists them in the block, by the layer's number among those with a block.

Tests: tests/core/layers/test_shared_blocks.py, tests/core/paths
"""

from __future__ import annotations

from collections.abc import Sequence

from ...compose.decoder_layer import DecoderLayer
from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Activation
from ...specs.layers import LayerSpec
from ...specs.recurrent import MambaSpec
from ...specs.tensor_names import TensorNames
from .. import reading, rotary
from ..defaults import Defaults
from ..mamba_1 import time_step_rank
from .headed_scan import HeadedScanSpec
from .layer import ZambaLayer

_MAMBA, _HYBRID = "linear_attention", "hybrid"

#: The first layers of Zamba, where `config.json` names none.
_BEGINNING = (_MAMBA, _MAMBA, _HYBRID)

#: Types of layers, and older names of them.
_TYPES = {_MAMBA: _MAMBA, "mamba": _MAMBA, _HYBRID: _HYBRID}

#: transformers' own eps of the norm of a mixer's output, and `max_position_embeddings` with `use_long_context`.
_MIXER_EPS, _LONG_CONTEXT = 1e-5, 16_384


def _read(fields: ConfigJson) -> ModelConfig:
    types = _layer_types(fields)
    if fields.boolean("use_long_context"):
        fields = fields.with_values({"max_position_embeddings": _LONG_CONTEXT})
    return reading.dense(fields, _layers(fields, types), reading.rms_norm(fields))


def _layer_types(fields: ConfigJson) -> list[str]:
    name, count = reading.one_of(fields, "layers_block_type", "layer_types"), fields.integer("num_hidden_layers")
    types = fields.texts(name)
    if fields.is_missing(name):
        types = [_MAMBA, *([_MAMBA] * 5 + [_HYBRID]) * 7, *[_MAMBA] * 4, _HYBRID, *[_MAMBA] * 3, _HYBRID, *[_MAMBA] * 2]
    if unknown := sorted(set(types) - _TYPES.keys()):
        raise fields.refuse(name, f"{unknown[0]} is not supported; supported: {', '.join(_TYPES)}")
    if len(types) != count:
        raise fields.refuse("num_hidden_layers", f"{name} has {len(types)} layers")
    return [_TYPES[kind] for kind in types]


def _layers(fields: ConfigJson, types: Sequence[str]) -> list[LayerSpec]:
    mamba, attention = _mamba(fields), _attention(fields)
    size = fields.optional("intermediate_size") or 4 * fields.integer("hidden_size")
    mlp = reading.gated(fields.with_values({"intermediate_size": size}), bias=fields.boolean("add_bias_linear"))
    rank = fields.integer("adapter_rank")
    heads_rank = rank if _has_pairs(fields, attention) else 0
    blocks = fields.integer("num_mem_blocks")
    found: list[LayerSpec] = [DecoderLayer(mamba, None)] * len(types)
    if not fields.boolean("tie_word_embeddings") and types.count(_HYBRID) > blocks:
        why = f"transformers ties blocks by it, too, and num_mem_blocks is {blocks}; only true is supported"
        raise fields.refuse("tie_word_embeddings", why)
    for number, (index, first) in enumerate(_firsts(fields, types, blocks)):
        found[index] = ZambaLayer(
            attention, mlp, behind=mamba, first=first, number=number, heads_rank=heads_rank, mlp_rank=rank
        )
    return found


def _firsts(fields: ConfigJson, types: Sequence[str], blocks: int) -> list[tuple[int, int]]:
    """The layers with a block, each with the first layer that has the same block. Layers take `blocks` blocks in turn.
    If embeddings are not tied, transformers ties no blocks, either, and each layer has a block of its own.
    """
    hybrids, name = [index for index, kind in enumerate(types) if kind == _HYBRID], "hybrid_layer_ids"
    if hybrids and not fields.is_missing(name) and [*fields.indices(name)] != hybrids:
        raise fields.refuse(name, f"the layers with a block are {hybrids}")
    is_tied = fields.boolean("tie_word_embeddings")
    return [(index, hybrids[number % blocks] if is_tied else index) for number, index in enumerate(hybrids)]


def _attention(fields: ConfigJson) -> AttentionSpec:
    """Heads of a block's input, which is twice as wide as the residual stream. The scale is that of heads of half the
    width.
    """
    wide = 2 * fields.integer("hidden_size")
    heads = reading.heads(fields.without("head_dim").with_values({"hidden_size": wide}))
    if fields.has("head_dim") and fields.integer("head_dim") != heads.head_dim:
        raise fields.refuse("head_dim", f"all heads of a block are as wide as its input, {heads.head_dim} each")
    if wide % heads.num_heads:
        raise fields.refuse("num_attention_heads", f"2 · hidden_size, {wide}, must be a multiple of it")
    rope = rotary.rope(fields, heads.head_dim) if fields.boolean("use_mem_rope") else None
    return AttentionSpec(*heads, scale=(heads.head_dim / 2) ** -0.5, rope=rope)


def _has_pairs(fields: ConfigJson, attention: AttentionSpec) -> bool:
    """True if layers add low-rank pairs of their own to the weights of queries, keys and values."""
    found = fields.boolean("use_shared_attention_adapter")
    if found and attention.num_kv_heads != attention.num_heads:
        why = f"transformers' low-rank pairs give as many keys as queries, num_attention_heads {attention.num_heads}"
        raise fields.refuse("num_key_value_heads", f"{why}, where use_shared_attention_adapter is true")
    return found


def _mamba(fields: ConfigJson) -> MambaSpec:
    heads, groups = fields.integer("n_mamba_heads"), fields.integer("mamba_ngroups")
    size = fields.integer("mamba_expand") * fields.integer("hidden_size")
    if size % heads:
        raise fields.refuse("n_mamba_heads", f"mamba_expand · hidden_size, {size}, must be a multiple of it")
    if heads % groups:
        raise fields.refuse("mamba_ngroups", f"n_mamba_heads, {heads}, must be a multiple of it")
    return MambaSpec(
        heads,
        size // heads,
        groups,
        fields.integer("mamba_d_state"),
        eps=_MIXER_EPS,
        conv_size=fields.integer("mamba_d_conv", least=2),
        bias=fields.boolean("add_bias_linear"),
        dt_min=fields.number("time_step_min"),
    )


def _read_first(fields: ConfigJson) -> ModelConfig:
    """Zamba: all layers with a block have the same one."""
    types = _types_by_period(fields)
    usual = 2 * fields.integer("hidden_size") // fields.integer("num_attention_heads")
    head_dim = fields.optional(reading.one_of(fields, "attention_head_dim", "head_dim")) or usual
    heads = reading.heads(fields.with_values({"head_dim": head_dim}))
    if (wide := fields.optional("attention_hidden_size")) not in (None, 2 * fields.integer("hidden_size")):
        raise fields.refuse("attention_hidden_size", f"a block reads 2 · hidden_size elements, not {wide}")
    attention = AttentionSpec(*heads, scale=(heads.head_dim / 2) ** -0.5, rope=None)
    mamba, mlp = _mamba_by_heads(fields), reading.gated(fields)
    found: list[LayerSpec] = [DecoderLayer(mamba, None)] * len(types)
    for number, (index, first) in enumerate(_firsts(fields, types, 1)):
        found[index] = ZambaLayer(attention, mlp, behind=mamba, first=first, number=number)
    return reading.dense(fields, found, reading.rms_norm(fields))


def _types_by_period(fields: ConfigJson) -> list[str]:
    name, count = reading.one_of(fields, "layers_block_type", "layer_types"), fields.integer("num_hidden_layers")
    if not fields.is_missing(name):
        return _layer_types(fields)
    period, first = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", least=0)
    if count < len(_BEGINNING):
        raise fields.refuse("num_hidden_layers", f"without {name}, transformers has {len(_BEGINNING)} layers or more")
    rest = range(count - len(_BEGINNING))
    return [*_BEGINNING, *(_HYBRID if index % period == first else _MAMBA for index in rest)]


def _mamba_by_heads(fields: ConfigJson) -> HeadedScanSpec:
    heads, size = fields.integer("n_mamba_heads"), fields.integer("mamba_expand") * fields.integer("hidden_size")
    if size % heads:
        raise fields.refuse("n_mamba_heads", f"mamba_expand · hidden_size, {size}, must be a multiple of it")
    if fields.text("hidden_mamba_act") != Activation.SILU:
        raise fields.refuse("hidden_mamba_act", "Mamba layers are supported with silu alone")
    return HeadedScanSpec(
        heads,
        size // heads,
        fields.integer("mamba_d_state"),
        time_step_rank(fields, "mamba_dt_rank"),
        conv_size=fields.integer("mamba_d_conv", least=2),
        conv_bias=fields.boolean("mamba_conv_bias"),
        bias=fields.boolean("mamba_proj_bias"),
    )


_OF_MIXERS = {"attention_norm": "input_layernorm", "mixer_norm": "mamba_decoder.input_layernorm"}


def _of_blocks(block: str) -> dict[str, str]:
    """The names that both families have in a block."""
    return {
        **_OF_MIXERS,
        "block_norm": f"{block}.input_layernorm",
        "mlp_norm": f"{block}.pre_ff_layernorm",
        **{f"self_attn.{each}_proj": f"{block}.self_attn.{each}_proj" for each in "qkvo"},
        "mlp.down_proj": f"{block}.feed_forward.down_proj",
    }


_BLOCK, _FIRST_BLOCK = "shared_transformer", "shared_transf"

ZAMBA = Family(
    "Zamba",
    ("ZambaForCausalLM",),
    _read_first,
    Defaults("ZambaConfig"),
    TensorNames(
        norm="final_layernorm",
        names={
            **_of_blocks(_FIRST_BLOCK),
            **{f"mlp.{each}_proj": f"{_FIRST_BLOCK}.feed_forward.{each}_proj" for each in ("gate", "up")},
        },
    ),
    nulls=("attention_head_dim", "attention_hidden_size"),
)

ZAMBA_2 = Family(
    "Zamba 2",
    ("Zamba2ForCausalLM",),
    _read,
    Defaults("Zamba2Config"),
    TensorNames(
        norm="final_layernorm",
        names={
            **_of_blocks(_BLOCK),
            **{
                f"self_attn.{each}_invocation_{part}": f"{_BLOCK}.self_attn.linear_{each}_adapter_list.{{}}.{number}"
                for each in "qkv"
                for number, part in enumerate(("down", "up"))
            },
            **{
                f"mlp.invocation_{part}": f"{_BLOCK}.feed_forward.gate_up_proj_adapter_list.{{}}.{number}"
                for number, part in enumerate(("down", "up"))
            },
        },
        fused={f"{_BLOCK}.feed_forward.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    nulls=("intermediate_size", "num_key_value_heads"),
)
