"""Jamba: layers of Mamba 1, with a few of attention without positions; every second one has a mixture of experts.

Tests: tests/core/layers/test_hybrid_paths.py, tests/core/paths
"""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.selective_scan import SelectiveScanSpec
from ..specs.tensor_names import TensorNames, gated_names, stacked_names
from . import reading, rotary
from .defaults import Defaults
from .mamba import check_time_steps
from .mamba_1 import STEPS_NOTE, time_step_rank


def _read(fields: ConfigJson) -> ModelConfig:
    check_time_steps(fields)
    norm, attention = reading.rms_norm(fields), rotary.attention(fields, rope=None, bias=False)
    mamba = SelectiveScanSpec(
        fields.integer("mamba_expand") * fields.integer("hidden_size"),
        fields.integer("mamba_d_state"),
        time_step_rank(fields, "mamba_dt_rank"),
        conv_size=fields.integer("mamba_d_conv", least=2),
        conv_bias=fields.boolean("mamba_conv_bias"),
        bias=fields.boolean("mamba_proj_bias"),
        norm=norm,
    )
    dense = mixture = reading.gated(fields)
    if fields.integer("num_experts") > 1:
        mixture = reading.experts(fields, Routing(1), size="intermediate_size")
    layers = [
        DecoderLayer(
            attention if _is_one(fields, "attn_layer", index) else mamba,
            mixture if _is_one(fields, "expert_layer", index) else dense,
        )
        for index in range(fields.integer("num_hidden_layers"))
    ]
    return reading.dense(fields, layers, norm)


def _is_one(fields: ConfigJson, kind: str, index: int) -> bool:
    """True for every so many layers, from one of the first on."""
    period, first = fields.integer(f"{kind}_period"), fields.integer(f"{kind}_offset", least=0)
    if first >= period:
        raise fields.refuse(f"{kind}_offset", f"it must be less than {kind}_period, {period}")
    return index % period == first


JAMBA = Family(
    "Jamba",
    ("JambaForCausalLM",),
    _read,
    Defaults("JambaConfig"),
    TensorNames(
        norm="final_layernorm",
        names={
            "attention_norm": "input_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            **gated_names("mlp", "feed_forward"),
            "mlp.gate": "feed_forward.router",
            **gated_names("mlp.experts.{}", "feed_forward.experts.{}"),
        },
        stacked_experts=stacked_names("feed_forward.experts"),
    ),
    notes=STEPS_NOTE,
    nulls=("num_key_value_heads",),
)
