"""Youtu-LLM and MiniCPM3: latent attention and a dense feed-forward part. MiniCPM3 has Granite's factors besides.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.tensor_names import LATENT_NORMS, LLAMA_NORMS, TensorNames
from . import latent, reading
from .defaults import UNREAD, Defaults


def _model(fields: ConfigJson, *, interleaved: bool, residual: float = 1.0, **others: Any) -> ModelConfig:
    """interleaved: how rotated elements are paired. residual: see `LayerSpec.residual_multiplier`."""
    attention = latent.attention(fields, interleaved=interleaved)
    feed_forward = reading.gated(fields, bias=fields.boolean("mlp_bias"))
    kind = partial(DecoderLayer, residual_multiplier=residual)
    return reading.decoder(fields, attention, feed_forward, kind=kind, **others)


def _read_youtu(fields: ConfigJson) -> ModelConfig:
    latent.check_head_dim(fields)
    return _model(fields.without("mlp_bias"), interleaved=fields.boolean("rope_interleave"))


def _read_minicpm(fields: ConfigJson) -> ModelConfig:
    hidden, count = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    depth, base = (reading.optional_number(fields, name) for name in ("scale_depth", "dim_model_base"))
    if fields.optional("v_head_dim") is None:
        fields = fields.with_values({"v_head_dim": hidden // fields.integer("num_attention_heads")})
    return _model(
        fields,
        interleaved=False,
        residual=1.0 if depth is None else depth / math.sqrt(count),
        embedding_multiplier=fields.number("scale_emb"),
        logits_scale=1.0 if base is None else base / hidden,
    )


_NAMES = TensorNames(names={**LLAMA_NORMS, **LATENT_NORMS})
_NOTE = f"{reading.LATENTS_NOTE}; `attention_bias` without `q_lora_rank` is refused"

YOUTU = Family(
    "Youtu-LLM",
    ("YoutuForCausalLM",),
    _read_youtu,
    Defaults("YoutuConfig", {"num_key_value_heads": UNREAD}, takes=("intermediate_size",)),
    _NAMES,
    notes=_NOTE,
    nulls=("rope_interleave", "v_head_dim"),
)
MINICPM_3 = Family(
    "MiniCPM3",
    ("MiniCPM3ForCausalLM",),
    _read_minicpm,
    Defaults("MiniCPM3Config", {"num_key_value_heads": UNREAD}),
    _NAMES,
    notes=_NOTE,
    nulls=("num_key_value_heads", "v_head_dim"),
)
