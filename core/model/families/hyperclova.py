"""HyperCLOVA X SEED: Granite's factors, and norms of each part's output."""

from __future__ import annotations

from functools import partial

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import granite, reading
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    return reading.decoder(
        fields,
        granite.scored(fields),
        reading.gated(fields, bias=fields.boolean("mlp_bias")),
        norms=Norms.AROUND if fields.boolean("use_post_norm") else Norms.BEFORE,
        kind=partial(DecoderLayer, residual_multiplier=fields.number("residual_multiplier")),
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
