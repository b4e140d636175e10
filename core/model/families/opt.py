"""OPT, BioGPT and XGLM: positions from row 2 of a table, LayerNorm, biases of all projections, and a feed-forward part
without a gate. XGLM's table is made of sines and cosines.

Tests: tests/core/test_families.py, tests/core/paths
"""

from __future__ import annotations

import math
from typing import Any

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import NormKind, NormSpec
from ..specs.tensor_names import TensorNames
from . import gpt_2, reading, rotary
from .defaults import TOKENS, Defaults

_EPS = 1e-5
"""PyTorch's of LayerNorm; no field changes it."""

_FIRST = 2
"""The row of position 0."""

_NAMES = {
    "attention_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}


def _read(fields: ConfigJson) -> ModelConfig:
    for name, why in {
        "do_layer_norm_before": "norms behind the additions, as of OPT-350m, are not supported",
        "layer_norm_elementwise_affine": "norms without weights are not supported for this family",
    }.items():
        if not fields.boolean(name):
            raise fields.refuse(name, why)
    if fields.boolean("_remove_final_layer_norm"):
        raise fields.refuse("_remove_final_layer_norm", "models without a last norm are not supported")
    if (width := fields.optional("word_embed_proj_dim")) and width != fields.integer("hidden_size"):
        raise fields.refuse("word_embed_proj_dim", "embeddings of another width than hidden_size are not supported")
    named = gpt_2.sizes(fields, {}, "ffn_dim")
    return _model(named, "activation_function", UngatedActivation.RELU, bias=fields.boolean("enable_bias"))


def _read_bio(fields: ConfigJson) -> ModelConfig:
    return _model(fields, "hidden_act", UngatedActivation.GELU, is_scaled=fields.boolean("scale_embedding"))


def _read_xglm(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("add_cross_attention"):
        raise fields.refuse("add_cross_attention", "a decoder beside an encoder is not supported")
    names = {"hidden_size": "d_model", "num_attention_heads": "attention_heads", "num_hidden_layers": "num_layers"}
    named = gpt_2.sizes(fields, names, "ffn_dim")
    is_scaled = fields.boolean("scale_embedding")
    return _model(named, "activation_function", UngatedActivation.GELU, is_scaled=is_scaled, is_made=True)


def _model(
    fields: ConfigJson,
    activation: str,
    default: UngatedActivation,
    *,
    bias: bool = True,
    is_scaled: bool = False,
    **table: Any,
) -> ModelConfig:
    """activation: its field. is_scaled: embeddings are multiplied by the root of their width. table: options of the
    table of positions.
    """
    return reading.decoder(
        fields,
        rotary.attention(gpt_2.alone(fields), rope=None, bias=bias),
        reading.ungated(fields, activation, default=default, bias=bias),
        NormSpec(_EPS, NormKind.BIASED_LAYER, wide=True),
        position_table=gpt_2.positions(fields, first=_FIRST, **table),
        embedding_multiplier=math.sqrt(fields.integer("hidden_size")) if is_scaled else 1.0,
    )


OPT = Family(
    "OPT",
    ("OPTForCausalLM",),
    _read,
    Defaults("OPTConfig", takes=TOKENS),
    TensorNames(
        prefixes=("model.decoder.", "decoder."), norm="final_layer_norm", positions="embed_positions", names=_NAMES
    ),
    notes="but OPT-350m, whose norms are behind the additions",
    nulls=("word_embed_proj_dim",),
)
BIOGPT = Family(
    "BioGPT",
    ("BioGptForCausalLM",),
    _read_bio,
    Defaults("BioGptConfig", takes=TOKENS),
    TensorNames(
        prefixes=("biogpt.", ""),
        heads=("output_projection.weight", "lm_head.weight"),
        norm="layer_norm",
        positions="embed_positions",
        names=_NAMES,
    ),
)
XGLM = Family(
    "XGLM",
    ("XGLMForCausalLM",),
    _read_xglm,
    Defaults("XGLMConfig", takes=TOKENS),
    TensorNames(norm="layer_norm", names=_NAMES),
)
