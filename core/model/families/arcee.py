"""Arcee (AFM): Llama with a feed-forward part without a gate; Nemotron and Jais 2, whose norms have biases, too."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import NormSpec
from . import reading, rotary
from .defaults import Defaults


def _model(fields: ConfigJson, norm: NormSpec) -> ModelConfig:
    feed_forward = reading.ungated(fields, default=UngatedActivation.RELU_SQUARED, bias=fields.boolean("mlp_bias"))
    return reading.decoder(fields, rotary.attention(fields), feed_forward, norm)


def _read_arcee(fields: ConfigJson) -> ModelConfig:
    return _model(fields, reading.rms_norm(fields))


def _read_nemotron(fields: ConfigJson) -> ModelConfig:
    return _model(fields, reading.layer_norm(fields, "norm_eps", one_plus=True))


def _read_jais(fields: ConfigJson) -> ModelConfig:
    return _model(fields, reading.layer_norm(fields, "layer_norm_eps"))


ARCEE = Family(
    "Arcee (AFM)",
    ("ArceeForCausalLM",),
    _read_arcee,
    Defaults("ArceeConfig"),
    nulls=("head_dim", "num_key_value_heads"),
)
NEMOTRON = Family(
    "Nemotron-4 and Minitron",
    ("NemotronForCausalLM",),
    _read_nemotron,
    Defaults("NemotronConfig"),
    nulls=("head_dim", "num_key_value_heads"),
)
JAIS_2 = Family(
    "Jais 2",
    ("Jais2ForCausalLM",),
    _read_jais,
    Defaults("Jais2Config"),
    nulls=("head_dim", "num_key_value_heads"),
)
