"""dots.llm1 and Solar Open: DeepSeek-V3's experts over grouped-query attention."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import glm_moe, reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads, count, bias = reading.heads(fields), fields.integer("num_hidden_layers"), fields.boolean("attention_bias")
    whole = fields.integer("max_window_layers", least=0)
    rope = rotary.rope(fields, heads.head_dim)
    types = fields.texts("layer_types") and reading.layer_types(fields, 1)
    types = types or [reading.FULL if index < whole else reading.SLIDING for index in range(count)]
    window = reading.checked_window(fields, types)
    attentions = [
        AttentionSpec(
            *heads,
            scale=heads.head_dim**-0.5,
            rope=rope,
            head_norm=HeadNorm.EACH,
            qkv_bias=bias,
            o_bias=bias,
            window=window if seen == reading.SLIDING else None,
        )
        for seen in types
    ]
    return glm_moe.model(fields, attentions)


def _read_solar(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    rope = rotary.rope(fields, heads.head_dim)
    return glm_moe.model(fields, AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope, qkv_bias=bias))


DOTS_1 = Family(
    "dots.llm1",
    ("Dots1ForCausalLM",),
    _read,
    Defaults("Dots1Config", takes=("intermediate_size",)),
    glm_moe.TENSORS,
    nulls=("n_shared_experts", "norm_topk_prob", "num_key_value_heads"),
)
SOLAR_OPEN = Family(
    "Solar Open",
    ("SolarOpenForCausalLM",),
    _read_solar,
    Defaults("SolarOpenConfig"),
    glm_moe.TENSORS,
)
