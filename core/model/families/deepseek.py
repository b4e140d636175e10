"""DeepSeek-V2, V3 and V3.2: latent attention. The first layers are dense, the others have routed and shared experts.

Kimi K2 and Moonlight are V3's models. Of V3 experts are chosen by sigmoids with a learned correction, as in GLM-4.5.
V3.2 attends to the tokens that an indexer chooses. DeepSeek-OCR 2 has V2's experts behind attention as of Llama.

Tests: tests/core/test_experts.py, tests/core/layers/test_latents.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from . import glm_moe, latent, reading
from .defaults import UNREAD, Defaults


def _read_v2(fields: ConfigJson) -> ModelConfig:
    routing = _greedy(fields)
    if fields.boolean("norm_topk_prob"):
        raise fields.refuse("norm_topk_prob", "transformers leaves it out for this family; only false is supported")
    _check_scoring(fields, "softmax")
    attention = latent.attention(fields, interleaved=True)
    if fields.boolean("mlp_bias", False):
        raise fields.refuse("mlp_bias", "biases of feed-forward parts are not supported for this family")
    return glm_moe.model(fields, attention, routing=routing)


def _read_v3(fields: ConfigJson) -> ModelConfig:
    _check_v3(fields)
    latent.check_head_dim(fields)
    return glm_moe.model(fields, latent.attention(fields, interleaved=fields.boolean("rope_interleave")))


def _read_v32(fields: ConfigJson) -> ModelConfig:
    _check_v3(fields)
    mixers = latent.indexed(fields, interleaved=False)
    return glm_moe.model(fields, mixers, has_experts=reading.mlp_layer_types(fields))


def _check_v3(fields: ConfigJson) -> None:
    if (method := fields.text("topk_method", "noaux_tc")) != "noaux_tc":
        raise fields.refuse("topk_method", f"{method} is not supported; supported: noaux_tc")
    _check_scoring(fields, "sigmoid")


def _greedy(fields: ConfigJson) -> Routing:
    """V2's router: the experts with the highest shares, or those of the best groups."""
    routing = Routing(1, factor=fields.number("routed_scaling_factor"))
    if (method := fields.text("topk_method", "greedy")) == "group_limited_greedy":
        groups, kept = reading.expert_groups(fields)
        return replace(routing, groups=groups, kept_groups=kept, group_best=1)
    if method != "greedy":
        raise fields.refuse("topk_method", f"{method} is not supported; supported: greedy, group_limited_greedy")
    return routing


def _check_scoring(fields: ConfigJson, supported: str) -> None:
    if (scoring := fields.text("scoring_func", supported)) != supported:
        raise fields.refuse("scoring_func", f"{scoring} is not supported; supported: {supported}")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.refuse("moe_layer_freq", "only experts in every layer after the dense ones are supported")


_NOTE = f"{reading.LATENTS_NOTE}; `attention_bias` without `q_lora_rank` is refused"

DEEPSEEK_V2 = Family(
    "DeepSeek-V2",
    ("DeepseekV2ForCausalLM",),
    _read_v2,
    Defaults("DeepseekV2Config", {"num_nextn_predict_layers": 0}, takes=("intermediate_size",)),
    glm_moe.TENSORS,
    notes=_NOTE,
    nulls=("norm_topk_prob", "num_key_value_heads"),
)
DEEPSEEK_V3 = Family(
    "DeepSeek-V3, Kimi K2 and Moonlight",
    ("DeepseekV3ForCausalLM",),
    _read_v3,
    Defaults(
        "DeepseekV3Config", {"num_nextn_predict_layers": 1, "num_key_value_heads": UNREAD}, takes=("intermediate_size",)
    ),
    glm_moe.TENSORS,
    notes=f"{_NOTE}; draft layers after the last are left out",
    nulls=("norm_topk_prob", "num_key_value_heads", "rope_interleave", "v_head_dim"),
)
DEEPSEEK_V32 = Family(
    "DeepSeek-V3.2",
    ("DeepseekV32ForCausalLM",),
    _read_v32,
    Defaults("DeepseekV32Config", {"num_nextn_predict_layers": 1}, takes=("intermediate_size",)),
    glm_moe.TENSORS,
    notes=f"{reading.INDEXER_NOTE}; draft layers after the last are left out",
)
