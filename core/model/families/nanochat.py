"""nanochat: norms without weights, of embeddings and of rotated heads, too; a rope that turns backward; and ReLU²."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import NormSpec
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, adjust=_backward, head_norm=HeadNorm.BARE)  # rotating changes no norm
    return reading.decoder(
        fields,
        attention,
        reading.ungated(fields, default=UngatedActivation.RELU_SQUARED),
        NormSpec(reading.rms_norm(fields).eps, weightless=True),
        embedding_norm=True,
        logits_softcap=reading.optional_number(fields, "final_logit_softcapping"),
    )


def _backward(fields: ConfigJson, rope: RopeConfig) -> RopeConfig:
    rotary.check_rotated_norm(fields, rope)
    return replace(rope, backward=True)


NANOCHAT = Family(
    "nanochat",
    ("NanoChatForCausalLM",),
    _read,
    Defaults("NanoChatConfig", takes=("intermediate_size",)),
    TensorNames(names={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}),
    nulls=("final_logit_softcapping", "num_key_value_heads"),
)
