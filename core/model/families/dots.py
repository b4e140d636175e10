"""dots.llm1 and Solar Open: DeepSeek-V3's experts over grouped-query attention."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import glm_moe, reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention, whole = rotary.attention(fields, head_norm=HeadNorm.EACH), fields.integer("max_window_layers", least=0)
    count = fields.integer("num_hidden_layers")
    types = reading.layer_types(fields, [reading.FULL if at < whole else reading.SLIDING for at in range(count)])
    return glm_moe.model(fields, rotary.of_types(fields, attention, types))


def _read_solar(fields: ConfigJson) -> ModelConfig:
    return glm_moe.model(fields, rotary.attention(fields, qkv_bias=fields.boolean("attention_bias")))


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
