"""Mixtral: Mistral with a mixture of experts."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads = reading.heads(fields)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rotary.rope(fields, heads.head_dim),
        window=fields.optional("sliding_window"),
    )
    experts = reading.experts(fields, Routing(1, renormalised=True), size="intermediate_size")
    layers = [DecoderLayer(attention, experts)] * fields.integer("num_hidden_layers")
    return reading.dense(fields, layers, reading.rms_norm(fields))


MIXTRAL = Family(
    "Mixtral",
    ("MixtralForCausalLM",),
    _read,
    Defaults("MixtralConfig"),
    TensorNames(
        names={
            **LLAMA_NORMS,
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
            "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
        }
    ),
    nulls=("head_dim",),
)
