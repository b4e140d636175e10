"""Granite 3, and the dense models of Granite 4: Llama with factors of embeddings, scores, residuals and logits.

Granite-MoE has a mixture of experts.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, Experts, GatedSpec, LayerSpec, Routing, Scoring
from ..tensor_names import LLAMA_NORMS, TensorNames
from . import reading

_FACTORS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")


def _model(fields: ConfigJson, feed_forward: GatedSpec | Experts, *, rotates: bool = True) -> ModelConfig:
    heads = reading.heads(fields)
    embedding, logits, residual, scores = (fields.number(name) for name in _FACTORS)
    bias = fields.boolean("attention_bias")
    attention = AttentionSpec(
        *heads,
        scale=scores,
        rope=reading.rope(fields, heads.head_dim) if rotates else None,
        qkv_bias=bias,
        o_bias=bias,
    )
    layer = LayerSpec(attention, feed_forward, residual_multiplier=residual)
    layers = [layer] * fields.integer("num_hidden_layers")
    norm = reading.rms_norm(fields)
    return reading.dense(fields, layers, norm, embedding_multiplier=embedding, logits_scale=1 / logits)


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, reading.gated(fields, bias=fields.boolean("mlp_bias")))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    routing, shared = Routing(1, Scoring.SOFTMAX_OF_CHOSEN), reading.number_of(fields, "shared_intermediate_size")
    experts = reading.experts(fields, routing, size="intermediate_size", shared_size=shared)
    return replace(_model(fields, experts), tensors=_WITH_SHARED if shared else _EXPERTS)


def _read_hybrid(fields: ConfigJson) -> ModelConfig:
    types = set(fields.texts("layer_types") or fields.texts("layers_block_type"))
    if types - {"attention", reading.FULL}:
        raise fields.refuse("layer_types", "only models whose layers are all attention are supported")
    if fields.integer("num_local_experts", least=0):
        raise fields.refuse("num_local_experts", "mixture-of-experts models are not supported")
    rotates = fields.text("position_embedding_type", "nope") == "rope"
    return _model(fields, reading.gated(fields, size="shared_intermediate_size"), rotates=rotates)


_EXPERTS = TensorNames(
    names={**LLAMA_NORMS, "mlp.gate": "block_sparse_moe.router.layer"},
    stacked_experts={
        "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
        "block_sparse_moe.output_linear.weight": ("down_proj",),
        "block_sparse_moe.experts.gate_up_proj": ("gate_proj", "up_proj"),
        "block_sparse_moe.experts.down_proj": ("down_proj",),
    },
    adapter_names={"mlp.gate": "block_sparse_moe.router"},
)
_WITH_SHARED = replace(
    _EXPERTS,
    names={**_EXPERTS.names, "mlp.shared_expert.down_proj": "shared_mlp.output_linear"},
    fused={"shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")},
)
_DEFAULTS = {"max_position_embeddings": 2048, **dict.fromkeys(_FACTORS, 1.0)}

GRANITE = Family("Granite 3", ("GraniteForCausalLM",), _read, _DEFAULTS)
GRANITE_4 = Family(
    "Granite 4 (dense)",
    ("GraniteMoeHybridForCausalLM",),
    _read_hybrid,
    {**_DEFAULTS, "num_local_experts": 8, "shared_intermediate_size": 1024},
    TensorNames(
        names={**LLAMA_NORMS, "mlp.down_proj": "shared_mlp.output_linear"},
        fused={"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    notes="models with Mamba layers or experts are refused",
)
GRANITE_MOE = Family(
    "Granite-MoE",
    ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    _read_experts,
    {**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
    _EXPERTS,
    notes=reading.EXPERTS_NOTE,
)
