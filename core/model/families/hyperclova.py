"""HyperCLOVA X SEED: Granite's factors, and norms of each part's output."""

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
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    scale = reading.optional_number(fields, "attention_multiplier")
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5 if scale is None else scale,
        rope=rotary.rope(fields, heads.head_dim),
        qkv_bias=bias,
        o_bias=bias,
    )
    layer = DecoderLayer(
        attention,
        reading.gated(fields, bias=fields.boolean("mlp_bias")),
        Norms.AROUND if fields.boolean("use_post_norm") else Norms.BEFORE,
        residual_multiplier=fields.number("residual_multiplier"),
    )
    return reading.dense(
        fields,
        [layer] * fields.integer("num_hidden_layers"),
        reading.rms_norm(fields),
        embedding_multiplier=fields.number("embedding_multiplier"),
        logits_scale=fields.number("logits_scaling"),
    )


HYPERCLOVA_X = Family(
    "HyperCLOVA X SEED",
    ("HyperCLOVAXForCausalLM",),
    _read,
    Defaults("HyperCLOVAXConfig"),
    TensorNames(names={**LLAMA_NORMS, "attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}),
    nulls=("attention_multiplier", "head_dim", "num_key_value_heads"),
)
