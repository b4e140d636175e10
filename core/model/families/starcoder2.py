"""StarCoder 2: norms with biases, biases of all projections, and a feed-forward part without a gate."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("use_bias")
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rotary.rope(fields, heads.head_dim),
        window=fields.optional("sliding_window"),
        qkv_bias=bias,
        o_bias=bias,
    )
    layer = DecoderLayer(attention, reading.ungated(fields, default=UngatedActivation.GELU_TANH, bias=bias))
    norm = reading.layer_norm(fields, "norm_epsilon")
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), norm)


STARCODER_2 = Family(
    "StarCoder 2",
    ("Starcoder2ForCausalLM",),
    _read,
    Defaults("Starcoder2Config"),
    TensorNames(names={**LLAMA_NORMS, "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
)
