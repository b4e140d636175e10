"""nanochat: norms without weights, of embeddings and of rotated heads, too; a rope that turns backward; and ReLU²."""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import NormSpec
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    rope = rotary.rope(fields, heads.head_dim)
    rotary.check_rotated_norm(fields, rope)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=replace(rope, backward=True),
        head_norm=HeadNorm.BARE,  # rotating changes no norm
        qkv_bias=bias,
        o_bias=bias,
    )
    layer = DecoderLayer(attention, reading.ungated(fields, default=UngatedActivation.RELU_SQUARED))
    return reading.dense(
        fields,
        [layer] * fields.integer("num_hidden_layers"),
        NormSpec(reading.rms_norm(fields).eps, weightless=True),
        embedding_norm=True,
        logits_softcap=reading.optional_number(fields, "final_logit_softcapping"),
    )


NANOCHAT = Family(
    "nanochat",
    ("NanoChatForCausalLM",),
    _read,
    Defaults("NanoChatConfig", takes=("intermediate_size",)),
    TensorNames(names={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}),
    nulls=("final_logit_softcapping", "num_key_value_heads"),
)
