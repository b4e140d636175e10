"""Aria's text: experts of the feed-forward part in every layer, beside ones that every token goes to.

Matrices of experts are stored with inputs first.

Tests: tests/core/test_experts.py, tests/core/test_text_parts.py
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Activation, Routing, Scoring
from ..specs.tensor_names import LLAMA_NORMS, SHARED_EXPERTS, STACKED_EXPERTS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("mlp_bias"):
        raise fields.refuse("mlp_bias", "biases of the shared experts are not supported; only false is")
    fields = reading.renamed(fields, {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk"})
    routing = Routing(1, Scoring.SOFTMAX_OF_CHOSEN)
    experts = reading.experts(fields, routing, size="intermediate_size", shared="moe_num_shared_experts")
    if experts.activation is not Activation.SILU:
        raise fields.refuse("hidden_act", "transformers changes that of shared experts alone; only silu is supported")
    return reading.decoder(fields, rotary.attention(fields), experts)


ARIA_TEXT = Family(
    "Aria (text)",
    ("AriaTextForCausalLM",),
    _read,
    Defaults("AriaTextConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    TensorNames(
        names={**LLAMA_NORMS, **SHARED_EXPERTS, "mlp.gate": "mlp.router"},
        stacked_experts={
            "mlp.experts.fc1.weight": ("gate_proj", "up_proj"),
            "mlp.experts.fc2.weight": ("down_proj",),
            **STACKED_EXPERTS,
        },
        transposed=True,
    ),
    nulls=("head_dim", "num_key_value_heads"),
)
