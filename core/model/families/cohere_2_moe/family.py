"""Cohere 2 MoE: Cohere 2's layers, all of which but the first ones have a mixture of experts.

Tests: tests/core/test_families.py, tests/core/test_experts.py
"""

from __future__ import annotations

from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Routing, Scoring
from ...specs.norms import Norms, NormSpec
from ...specs.tensor_names import TensorNames
from .. import glm_moe, reading, rotary
from ..cohere import model_of
from ..defaults import Defaults
from .layer import CohereMoeLayer


def _read(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    if fields.raw.get("rope_scaling"):
        raise fields.refuse("rope_scaling", "transformers leaves it out for this family; set rope_parameters")
    if not fields.raw.get("rope_parameters", True):
        raise fields.refuse(
            "rope_parameters", "an object with rope_type is needed; leave the field out for its default"
        )
    rotary.check_original(rotary.rope_fields(fields))
    rope = rotary.rope(fields, heads.head_dim, interleaved=True)
    count, size = fields.integer("num_hidden_layers"), fields.integer("intermediate_size")
    first = reading.number_of(fields, "first_k_dense_replace")
    of_first = fields.integer("prefix_dense_sliding_window_pattern")
    has_experts = reading.mlp_layer_types(fields, first)
    patterns = [(of_first, range(first)), (fields.integer("sliding_window_pattern"), range(max(0, count - first)))]
    types = [
        reading.SLIDING if (index + 1) % pattern else reading.FULL for pattern, some in patterns for index in some
    ][:count]
    types = reading.layer_types(fields, 1) if fields.texts("layer_types") else types
    window = reading.checked_window(fields, types)
    experts = reading.experts(
        fields,
        _routing(fields),
        size="intermediate_size",
        shared_size=reading.number_of(fields, "num_shared_experts") * size,
    )
    plain = experts if all(has_experts) else reading.gated(fields, size="prefix_dense_intermediate_size")
    layers = [
        CohereMoeLayer(
            AttentionSpec(
                *heads,
                scale=heads.head_dim**-0.5,
                rope=rope if (kind == reading.SLIDING and window) or (not is_sparse and of_first == 1) else None,
                window=window if kind == reading.SLIDING else None,
                qkv_bias=bias,
                o_bias=bias,
            ),
            experts if is_sparse else plain,
            Norms.PARALLEL,
            factor=_shared_factor(fields),
        )
        for kind, is_sparse in zip(types, has_experts, strict=True)
    ]
    if (eps := reading.optional_number(fields, "rms_norm_eps")) is None:
        return model_of(fields, layers)
    return reading.dense(fields, layers, NormSpec(eps), logits_scale=fields.number("logit_scale"))


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
        names={
            **{name: given for name, given in glm_moe.NAMES.items() if name.startswith("mlp.")},
            "attention_norm": "input_layernorm",
        }
    ),
    nulls=("num_key_value_heads", "rms_norm_eps"),
)
