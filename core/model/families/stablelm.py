"""StableLM: norms with biases, a gated feed-forward part, in some models beside attention, and a partial rope."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("qk_layernorm"):
        raise fields.refuse("qk_layernorm", "norms of heads in a tensor for each head are not supported")
    heads = reading.heads(fields.without("head_dim"))
    if fields.raw.get("head_dim") not in (None, heads.head_dim):
        raise fields.refuse("head_dim", f"hidden_size / num_attention_heads, {heads.head_dim}, is needed, or none")
    rope = rotary.rope(fields, heads.head_dim)
    bias = fields.boolean("use_qkv_bias")
    attention = AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope, qkv_bias=bias)
    norms = Norms.PARALLEL if fields.boolean("use_parallel_residual") else Norms.BEFORE
    layers = [DecoderLayer(attention, reading.gated(fields), norms)] * fields.integer("num_hidden_layers")
    return reading.dense(fields, layers, reading.layer_norm(fields, "layer_norm_eps"))


STABLELM = Family(
    "StableLM",
    ("StableLmForCausalLM",),
    _read,
    Defaults("StableLmConfig"),
    TensorNames(names=LLAMA_NORMS),
    notes="models with norms of heads (`qk_layernorm`) are refused",
)
