"""Cohere 2 MoE: Cohere 2's layers, all of which but the first ones have a mixture of experts.

Tests: tests/core/test_families.py, tests/core/test_experts.py
"""

from __future__ import annotations

from dataclasses import replace

from ...config_json import ConfigJson
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Routing, Scoring
from ...specs.norms import Norms, NormSpec
from ...specs.tensor_names import SHARED_EXPERTS, TensorNames
from .. import reading, rotary
from ..cohere import norm_of
from ..defaults import Defaults
from .layer import CohereMoeLayer


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.raw.get("rope_scaling"):
        raise fields.refuse("rope_scaling", "transformers leaves it out for this family; set rope_parameters")
    if not fields.raw.get("rope_parameters", True):
        raise fields.refuse(
            "rope_parameters", "an object with rope_type is needed; leave the field out for its default"
        )
    rotary.check_original(rotary.rope_fields(fields))
    attention, count = rotary.attention(fields, interleaved=True), fields.integer("num_hidden_layers")
    first = reading.number_of(fields, "first_k_dense_replace")
    of_first = fields.integer("prefix_dense_sliding_window_pattern")
    has_experts = reading.mlp_layer_types(fields, first)
    patterns = [(of_first, range(first)), (fields.integer("sliding_window_pattern"), range(max(0, count - first)))]
    types = [reading.SLIDING if (index + 1) % pattern else reading.FULL for pattern, some in patterns for index in some]
    windows = reading.windows_of(fields, reading.layer_types(fields, types[:count]))
    size = "intermediate_size"
    experts = reading.experts(fields, _routing(fields), size=size, shared="num_shared_experts")
    plain = experts if all(has_experts) else reading.gated(fields, size="prefix_dense_intermediate_size")
    factor = _shared_factor(fields)
    layers = []
    for window, is_sparse in zip(windows, has_experts, strict=True):
        rope = attention.rope if window or (not is_sparse and of_first == 1) else None
        part = experts if is_sparse else plain
        layers.append(CohereMoeLayer(replace(attention, rope=rope, window=window), part, Norms.PARALLEL, factor=factor))
    eps = reading.optional_number(fields, "rms_norm_eps")
    norm = norm_of(fields) if eps is None else NormSpec(eps)
    return reading.dense(fields, layers, norm, logits_scale=fields.number("logit_scale"))


def _routing(fields: ConfigJson) -> Routing:
    if (name := fields.text("expert_selection_fn")) not in ("softmax", "sigmoid"):
        raise fields.refuse("expert_selection_fn", "not supported; supported: softmax, sigmoid")
    if name == "softmax":
        return Routing(1, Scoring.SOFTMAX_OF_CHOSEN)
    return Routing(1, Scoring.SIGMOID, renormalised=fields.boolean("norm_topk_prob"))


def _shared_factor(fields: ConfigJson) -> float:
    """Of the sum of the routed experts' output and the shared ones'."""
    strategy = fields.text("shared_expert_combination_strategy")
    if strategy not in ("average", "sum"):
        raise fields.refuse("shared_expert_combination_strategy", "not supported; supported: average, sum")
    return 0.5 if strategy == "average" and reading.number_of(fields, "num_shared_experts") else 1.0


COHERE_2_MOE = Family(
    "Cohere 2 MoE",
    ("Cohere2MoeForCausalLM",),
    _read,
    Defaults("Cohere2MoeConfig", takes=("intermediate_size",)),
    TensorNames(
        names={**SHARED_EXPERTS, "attention_norm": "input_layernorm"},
    ),
    nulls=("num_key_value_heads", "rms_norm_eps"),
)
