"""Falcon-H1: every layer has attention and Mamba 2 side by side, with factors of both and of its gated part.

Tests: tests/core/layers/test_two_mixers.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec
from ...specs.config import ModelConfig
from ...specs.family import Family
from .. import reading, rotary
from ..bamba import BAMBA
from ..defaults import Defaults
from ..mamba import mamba_2
from .layer import FalconH1Layer, MixerBeside


def _read(fields: ConfigJson) -> ModelConfig:
    part = reading.gated(fields, bias=fields.boolean("mlp_bias"))
    gate, out = _factors(fields, "mlp_multipliers", 2) or (1.0, 1.0)
    return reading.decoder(
        fields,
        _attention(fields),
        part,
        kind=partial(FalconH1Layer, gate_factor=gate, part_factor=out, beside=_beside(fields)),
        embedding_multiplier=fields.number("embedding_multiplier"),
        logits_scale=fields.number("lm_head_multiplier"),
    )


def _attention(fields: ConfigJson) -> AttentionSpec:
    """The factor of keys, which comes after their bias, is one of the scores."""
    own = rotary.attention(fields)
    return replace(own, scale=own.scale * fields.number("key_multiplier"))


def _beside(fields: ConfigJson) -> MixerBeside:
    size = fields.optional("mamba_d_ssm")
    mamba = replace(
        mamba_2(fields, size),
        gates_norm=fields.boolean("mamba_norm_before_gate") if fields.boolean("mamba_rms_norm") else None,
        out_bias=fields.boolean("projectors_bias"),
    )
    return MixerBeside(
        mamba,
        in_factor=fields.number("ssm_in_multiplier"),
        out_factor=fields.number("ssm_out_multiplier"),
        attention_in=fields.number("attention_in_multiplier"),
        attention_out=fields.number("attention_out_multiplier"),
        section_factors=_factors(fields, "ssm_multipliers", 5),
    )


def _factors(fields: ConfigJson, name: str, count: int) -> tuple[float, ...]:
    """So many factors; none where the field is missing or null, which stands for ones, or where all are 1."""
    found = fields.numbers(name)
    if len(found) != count and not fields.is_missing(name):
        raise fields.refuse(name, f"{count} numbers are needed")
    return tuple(map(float, found)) if set(found) - {1.0} else ()


FALCON_H1 = Family(
    "Falcon-H1",
    ("FalconH1ForCausalLM",),
    _read,
    Defaults("FalconH1Config"),
    BAMBA.tensors,
    nulls=("mamba_d_head", "mamba_d_ssm", "mamba_norm_before_gate", "mamba_rms_norm", "num_key_value_heads"),
)
