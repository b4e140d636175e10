"""Flint: Qwen3's attention with sinks, without a rope in layers that have no window; experts by sigmoid scores."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing, Scoring
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    count = fields.integer("num_hidden_layers")
    routing = Routing(1, Scoring.SIGMOID, renormalised=fields.boolean("norm_topk_prob"))
    experts = reading.experts(fields, routing, shared=fields.integer("shared_expert_intermediate_size"))
    if fields.is_null("sliding_window"):
        raise fields.refuse("sliding_window", "a number of positions is needed; leave the field out for its default")
    attention = rotary.attention(fields, head_norm=HeadNorm.EACH, sinks=True)
    is_whole = [index < 2 or index % 4 == 1 or index == count - 1 for index in range(count)]
    types = [reading.FULL if it else reading.SLIDING for it in is_whole]
    ropes = {reading.FULL: None, reading.SLIDING: attention.rope}
    mixers = rotary.of_types(fields, attention, reading.layer_types(fields, types), ropes)
    if not fields.has("mlp_only_layers"):
        fields = fields.with_values({"mlp_only_layers": [0, 1]})
    norm, has_experts = reading.rms_norm(fields, wide=True), reading.sparse_layers(fields)
    return reading.decoder(fields, mixers, experts, norm, has_experts=has_experts)


FLINT = Family(
    "Flint",
    ("FlintForCausalLM",),
    _read,
    Defaults("FlintConfig", takes=("intermediate_size",)),
    TensorNames(names={**LLAMA_NORMS, "self_attn.sinks": "self_attn.softmax_offset"}),
)
