"""Mamba 2: each layer is a state space mixer alone, so that a request has states and no KV.

Tests: tests/core/layers/test_states_alone.py, tests/core/paths
"""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import NormSpec
from ..specs.recurrent import MambaSpec
from ..specs.tensor_names import TensorNames
from . import reading
from .defaults import Defaults
from .mamba import check_time_steps

#: Tokens of a request, where `config.json` says nothing, as that of transformers' class does: states have no limit.
MOST_TOKENS = 1 << 20

#: Names of a layer's parts, and of the model's, in transformers' classes of Mamba.
MIXER_NAMES = {
    "attention_norm": "norm",
    "mamba": "mixer",
    **{f"mamba.{each}": f"mixer.{each}" for each in ("in_proj", "out_proj", "conv1d", "norm")},
}


def _read(fields: ConfigJson) -> ModelConfig:
    heads, groups, head_dim = fields.integer("num_heads"), fields.integer("n_groups"), fields.integer("head_dim")
    size = fields.integer("expand") * fields.integer("hidden_size")
    if heads * head_dim != size:
        raise fields.refuse("head_dim", f"num_heads {heads} times it must be expand · hidden_size, {size}")
    if heads % groups:
        raise fields.refuse("n_groups", f"num_heads, {heads}, must be a multiple of it")
    check_time_steps(fields)
    norm = NormSpec(fields.number("layer_norm_epsilon"))
    mixer = MambaSpec(
        heads,
        head_dim,
        groups,
        fields.integer("state_size"),
        eps=norm.eps,
        conv_size=fields.integer("conv_kernel", least=2),
        conv_bias=fields.boolean("use_conv_bias"),
        bias=fields.boolean("use_bias"),
    )
    layers = [DecoderLayer(mixer, None)] * fields.integer("num_hidden_layers")
    most = fields.integer("max_position_embeddings", MOST_TOKENS)
    return reading.dense(fields.with_values({"max_position_embeddings": most}), layers, norm)


MAMBA_2 = Family(
    "Mamba 2",
    ("Mamba2ForCausalLM",),
    _read,
    Defaults("Mamba2Config"),
    TensorNames(prefixes=("backbone.", ""), norm="norm_f", embeddings="embeddings", names=MIXER_NAMES),
)
