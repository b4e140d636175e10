"""StableLM: norms with biases, a gated feed-forward part, in some models beside attention, and a partial rope."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("qk_layernorm"):
        raise fields.refuse("qk_layernorm", "norms of heads in a tensor for each head are not supported")
    attention = rotary.attention(fields.without("head_dim"), qkv_bias=fields.boolean("use_qkv_bias"))
    if fields.raw.get("head_dim") not in (None, size := attention.head_dim):
        raise fields.refuse("head_dim", f"hidden_size / num_attention_heads, {size}, is needed, or none")
    norms = Norms.PARALLEL if fields.boolean("use_parallel_residual") else Norms.BEFORE
    norm = reading.layer_norm(fields, "layer_norm_eps")
    return reading.decoder(fields, attention, reading.gated(fields), norm, norms=norms)


STABLELM = Family(
    "StableLM",
    ("StableLmForCausalLM",),
    _read,
    Defaults("StableLmConfig"),
    TensorNames(names=LLAMA_NORMS),
    notes="models with norms of heads (`qk_layernorm`) are refused",
)
