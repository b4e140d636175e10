"""BLOOM and MPT: scores that fall with the distance between query and key (ALiBi), in place of positions.

BLOOM normalises embeddings, and its projection to q, k and v has the rows of all three by head. MPT has no biases.

Tests: tests/core/test_families.py, tests/core/paths
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation, UngatedSpec
from ..specs.norms import NormKind, NormSpec
from ..specs.tensor_names import LLAMA_NORMS, QKV
from . import gpt_2, reading, rotary
from .defaults import TOKENS, UNREAD, Defaults

_FUSED = "self_attention.query_key_value"

#: Matrices of a feed-forward part without a gate, of this and other older families.
DENSE_NAMES = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("apply_residual_connection_post_layernorm"):
        why = "a residual stream of normalised values is not supported; only false is"
        raise fields.refuse("apply_residual_connection_post_layernorm", why)
    if fields.boolean("slow_but_exact") and fields.integer("pretraining_tp") > 1:
        raise fields.refuse("slow_but_exact", "sums of parts, as of its training, are not supported; only false is")
    names = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "hidden_size": "n_embed"}
    fields = gpt_2.alone(reading.renamed(fields, names))
    slopes = tuple(_slopes(reading.heads(fields).num_heads))
    attention = rotary.attention(fields, rope=None, bias=True, slopes=slopes)
    feed_forward = UngatedSpec(4 * fields.integer("hidden_size"), UngatedActivation.GELU_TANH, bias=True)
    positions = fields.integer("max_position_embeddings", fields.integer("seq_length", _TRAINED))
    fields = fields.with_values({"max_position_embeddings": positions})
    norm = reading.layer_norm(fields, "layer_norm_epsilon")
    return reading.decoder(fields, attention, feed_forward, norm, embedding_norm=True)


#: Positions that BLOOM was trained for. Nothing limits them, and transformers' class has no field of them.
_TRAINED = 2048


def _slopes(heads: int) -> list[float]:
    """BLOOM's slopes: the powers of 2^(-8 / heads). Where heads are no power of two, the slopes of the next lower power
    of two, then every second one of the next higher.
    """
    lower = 2 ** math.floor(math.log2(heads))
    found = [2 ** (-8 * number / lower) for number in range(1, lower + 1)]
    return found + [2 ** (-4 * number / lower) for number in range(1, 2 * (heads - lower), 2)]


def _read_mpt(fields: ConfigJson) -> ModelConfig:
    own = fields.object("attn_config") or fields.part("attn_config", {})
    for name, only in _FIXED.items():
        own.states(name, only)
    for name, only in {"no_bias": True, "expansion_ratio": 4, "logit_scale": None}.items():
        fields.states(name, only)
    fields = fields.with_values({"max_position_embeddings": fields.integer("max_seq_len")})
    names = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    fields = gpt_2.alone(reading.renamed(fields, names))
    heads = reading.heads(fields)
    attention = rotary.attention(
        fields,
        scale=reading.optional_number(own, "softmax_scale") or heads.head_dim**-0.5,
        rope=None,
        bias=False,
        slopes=tuple(_slopes_of_mpt(heads.num_heads)),
        clip=reading.optional_number(own, "clip_qkv"),
    )
    feed_forward = UngatedSpec(4 * fields.integer("hidden_size"), UngatedActivation.GELU)
    eps = fields.number("layer_norm_epsilon", None if fields.has("layer_norm_epsilon") else 1e-5)
    return reading.decoder(fields, attention, feed_forward, NormSpec(eps, NormKind.LAYER, wide=True))


#: Fields of `attn_config`, each with the only value that transformers computes.
_FIXED = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "alibi": True, "alibi_bias_max": 8}


def _slopes_of_mpt(heads: int) -> list[float]:
    """MPT's slopes: the powers of 2^(-8 / heads). Where heads are no power of two, the slopes of the next higher power
    of two, every second one first.
    """
    higher = 2 ** math.ceil(math.log2(heads))
    found = [2 ** (-8 * number / higher) for number in range(1, higher + 1)]
    return found if higher == heads else (found[1::2] + found[::2])[:heads]


BLOOM = Family(
    "BLOOM and BLOOMZ",
    ("BloomForCausalLM",),
    _read,
    Defaults(
        "BloomConfig",
        {"num_attention_heads": 8, "num_hidden_layers": 2},
        takes=("hidden_size", "vocab_size", *TOKENS),
    ),
    replace(
        gpt_2.TENSORS,
        embeddings="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        names={**LLAMA_NORMS, "self_attn.o_proj": "self_attention.dense", **DENSE_NAMES},
        fused={_FUSED: QKV},
        by_unit=(_FUSED,),
    ),
    notes="up to 2,048 positions, or as many as `seq_length` says",
)
MPT = Family(
    "MPT",
    ("MptForCausalLM", "MPTForCausalLM"),
    _read_mpt,
    Defaults(
        "MptConfig",
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "no_bias": UNREAD,
            "expansion_ratio": UNREAD,
            "logit_scale": UNREAD,
        },
        takes=("vocab_size",),
    ),
    replace(
        gpt_2.TENSORS,
        norm="norm_f",
        layers="blocks",
        names={
            "attention_norm": "norm_1",
            "mlp_norm": "norm_2",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "ffn.up_proj",
            "mlp.down_proj": "ffn.down_proj",
        },
        fused={"attn.Wqkv": QKV},
    ),
    nulls=("clip_qkv", "logit_scale", "softmax_scale"),
)
