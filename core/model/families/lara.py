"""Lara Mini: layers of Gated DeltaNet between layers of attention with a window, or without window and rope; experts in
every layer, beside one that every token goes to.

Tests: tests/core/test_experts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import TensorNames
from . import qwen3_5, reading, rotary
from .defaults import Defaults

_LINEAR = "linear_attention"


def _read(fields: ConfigJson) -> ModelConfig:
    count, norm = fields.integer("num_hidden_layers"), reading.rms_norm(fields, wide=True)
    types = fields.texts("layer_types") or [_PATTERN[at % len(_PATTERN)] for at in range(count)]
    reading.checked_types(fields, types, (reading.FULL, reading.SLIDING, _LINEAR))
    experts = reading.experts(
        fields,
        Routing(1, renormalised=fields.boolean("norm_topk_prob")),
        shared=fields.integer("shared_expert_intermediate_size"),
    )
    attention = rotary.attention(fields, head_norm=HeadNorm.EACH)
    mixers = {
        reading.FULL: replace(attention, rope=None),
        reading.SLIDING: replace(attention, window=reading.checked_window(fields, types)),
        _LINEAR: qwen3_5.delta(fields, norm.eps),
    }
    return reading.decoder(fields, [mixers[kind] for kind in types], experts, norm)


_PATTERN = (_LINEAR, reading.SLIDING, _LINEAR, reading.FULL, reading.SLIDING)
_FUSED = "linear_attn.in_proj"
_PARTS = tuple(f"{_FUSED}_{each}" for each in ("qkv", "z", "b", "a"))

LARA_MINI = Family(
    "Lara Mini",
    ("LaraMiniForCausalLM",),
    _read,
    Defaults("LaraMiniConfig", takes=("eos_token_id",)),
    TensorNames(fused={_FUSED: _PARTS}, separate=(_FUSED,), older={"linear_attn.norm": "linear_attn.out_norm"}),
)
