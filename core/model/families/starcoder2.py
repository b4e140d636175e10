"""StarCoder 2: norms with biases, biases of all projections, and a feed-forward part without a gate."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    bias = fields.boolean("use_bias")
    attention = rotary.attention(fields, bias=bias, window=fields.optional("sliding_window"))
    feed_forward = reading.ungated(fields, default=UngatedActivation.GELU_TANH, bias=bias)
    return reading.decoder(fields, attention, feed_forward, reading.layer_norm(fields, "norm_epsilon"))


STARCODER_2 = Family(
    "StarCoder 2",
    ("Starcoder2ForCausalLM",),
    _read,
    Defaults("Starcoder2Config"),
    TensorNames(names={**LLAMA_NORMS, "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
)
