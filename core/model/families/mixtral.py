"""Mixtral: Mistral with a mixture of experts."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import LETTERS, LLAMA_NORMS, TensorNames, gated_names
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, bias=False, window=fields.optional("sliding_window"))
    experts = reading.experts(fields, Routing(1, renormalised=True), size="intermediate_size")
    return reading.decoder(fields, attention, experts)


MIXTRAL = Family(
    "Mixtral",
    ("MixtralForCausalLM",),
    _read,
    Defaults("MixtralConfig"),
    TensorNames(
        names={
            **LLAMA_NORMS,
            "mlp.gate": "block_sparse_moe.gate",
            **gated_names("mlp.experts.{}", "block_sparse_moe.experts.{}", LETTERS),
        }
    ),
    nulls=("head_dim",),
)
