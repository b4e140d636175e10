"""MiMo-V2-Flash: values are narrower than keys and have a factor; layers with windows have sinks, and twice the heads
of keys and values. Its experts are routed as DeepSeek-V3's, and there is no shared expert.

Tests: tests/core/layers/test_narrow_values.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...config_json import ConfigJson
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.rope_config import RopeConfig
from ...specs.tensor_names import LLAMA_NORMS, TensorNames
from .. import reading, rotary
from ..defaults import Defaults
from ..reading import FULL, SLIDING
from .layer import MiMoLayer

#: Where `rope_parameters` is missing.
_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
}


def _read(fields: ConfigJson) -> ModelConfig:
    heads, count = reading.heads(fields), fields.integer("num_hidden_layers")
    value = fields.integer("v_head_dim", least=2)
    if value > heads.head_dim:
        why = f"values wider than keys, of head_dim {heads.head_dim}, are not supported"
        raise fields.refuse("v_head_dim", why)
    if heads.num_heads % (2 * heads.num_kv_heads):
        why = f"num_attention_heads, {heads.num_heads}, must be a multiple of twice as many: of layers with windows"
        raise fields.refuse("num_key_value_heads", why)
    if (seen := fields.optional("sliding_window_size")) is not None:  # tokens before the query's own
        fields = fields.with_values({"sliding_window": seen + 1})
    default = [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(count)]
    types = reading.layer_types(fields, default)
    ropes = {kind: _rope(fields, kind, heads.head_dim) for kind in dict.fromkeys(types)}
    factor = reading.optional_number(fields, "attention_value_scale")
    narrow = None if value == heads.head_dim else value
    attention = rotary.attention(fields, rope=None, qkv_bias=fields.boolean("attention_bias"), value_dim=narrow)
    mixers = [
        replace(
            attention,
            num_kv_heads=heads.num_kv_heads * (1 if kind == FULL else 2),
            rope=ropes[kind],
            window=window,
            sinks=kind == SLIDING,
            form="full" if kind == FULL else "",
        )
        for kind, window in zip(types, reading.windows_of(fields, types), strict=True)
    ]
    if fields.is_null("routed_scaling_factor"):
        fields = fields.with_values({"routed_scaling_factor": 1.0})
    experts = reading.experts(fields, reading.routing_in_groups(fields))
    kind = partial(MiMoLayer, value_factor=1.0 if factor is None else factor)
    return reading.decoder(fields, mixers, experts, has_experts=reading.mlp_layer_types(fields, 1), kind=kind)


def _rope(fields: ConfigJson, kind: str, head_dim: int) -> RopeConfig:
    """The rope of a type of layer. Of the default type, no field outside of its object has an effect."""
    own, name = rotary.whole_rope(fields, kind, _ROPES), "partial_rotary_factor"
    if rotary.rope_type_of(own) == "default":
        return rotary.rope_of_type(fields.without(name).with_defaults({name: 0.334}), head_dim, own)
    return rotary.rope_of_type(fields.with_defaults({name: 1.0}), head_dim, own)


MIMO_V2_FLASH = Family(
    "MiMo-V2-Flash",
    ("MiMoV2FlashForCausalLM",),
    _read,
    Defaults("MiMoV2FlashConfig", takes=("intermediate_size", "bos_token_id")),
    TensorNames(
        names={**LLAMA_NORMS, "self_attn.sinks": "self_attn.attention_sink_bias"},
        left_out=("model.mtp.",),
    ),
    notes="pages keep values as wide as keys; draft layers are left out",
    nulls=("attention_value_scale", "routed_scaling_factor"),
)
