"""Granite 3 and 4: Llama with factors of embeddings, scores, residuals and logits.

Granite-MoE has a mixture of experts. Granite 4 may have layers of Mamba 2, and a mixture of experts beside one that all
tokens go to. Granite SWA has windows, sinks, and a rope of its own in each layer.

Tests: tests/core/test_families.py, tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Experts, GatedSpec, Routing, Scoring
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import LLAMA_NORMS, TensorNames, stacked_names
from . import reading, rotary
from .defaults import Defaults
from .mamba import mamba_2

_MAMBA = "linear_attention"

_FACTORS = ("embedding_multiplier", "logits_scaling", "residual_multiplier")


def _model(fields: ConfigJson, feed_forward: GatedSpec | Experts, *, rotates: bool = True) -> ModelConfig:
    embedding, logits, residual = (fields.number(name) for name in _FACTORS)
    return reading.decoder(
        fields,
        scored(fields) if rotates else scored(fields, rope=None),
        feed_forward,
        kind=partial(DecoderLayer, residual_multiplier=residual),
        embedding_multiplier=embedding,
        logits_scale=1 / logits,
        scales_image_rows=True,
    )


def scored(fields: ConfigJson, **options: Any) -> AttentionSpec:
    """Attention whose factor of scores may have a field. options: of `rotary.attention`."""
    own, scale = rotary.attention(fields, **options), reading.optional_number(fields, "attention_multiplier")
    return own if scale is None else replace(own, scale=scale)


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, reading.gated(fields, bias=fields.boolean("mlp_bias")))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    routing, shared = Routing(1, Scoring.SOFTMAX_OF_CHOSEN), reading.number_of(fields, "shared_intermediate_size")
    experts = reading.experts(fields, routing, size="intermediate_size", shared=shared)
    return replace(_model(fields, experts), tensors=_WITH_SHARED if shared else _EXPERTS)


def _read_windows(fields: ConfigJson) -> ModelConfig:
    return _with_windows(fields, _read(fields))


def _read_windows_experts(fields: ConfigJson) -> ModelConfig:
    model = _with_windows(fields, _read_experts(fields))
    return replace(model, tensors=replace(model.tensors, names={**model.tensors.names, **_ROUTER}, adapter_names={}))


def _with_windows(fields: ConfigJson, model: ModelConfig) -> ModelConfig:
    """The model with sinks, and with each layer's own window and rope."""
    count = len(model.layers)
    types = [reading.SLIDING if index % 4 else reading.FULL for index in range(count)]
    windows = reading.windows_of(fields, reading.layer_types(fields, types))
    layers = [
        replace(layer, mixer=replace(model.attention, window=window, rope=rope, sinks=True))
        for layer, window, rope in zip(model.layers, windows, _ropes(fields, model), strict=True)
    ]
    return replace(model, layers=tuple(layers))


def _ropes(fields: ConfigJson, model: ModelConfig) -> list[RopeConfig | None]:
    """Of each layer, with its base from `layer_rope_theta`; where that is 0, None."""
    bases, scaling = fields.numbers("layer_rope_theta"), rotary.rope_fields(fields)
    if not bases and fields.is_missing("layer_rope_theta"):
        return [layer.rope for layer in model.layers]
    if len(bases) != len(model.layers):
        raise fields.refuse("layer_rope_theta", f"{len(bases)} bases for num_hidden_layers, {len(model.layers)}")
    found = {
        base: rotary.rope(fields, model.head_dim, of=scaling.with_values({"rope_theta": base})) if base else None
        for base in dict.fromkeys(bases)
    }
    return [found[base] for base in bases]


def _read_hybrid(fields: ConfigJson) -> ModelConfig:
    rotates, size = fields.text("position_embedding_type", "nope") == "rope", "shared_intermediate_size"
    if fields.integer("num_local_experts", least=0):
        routing, shared = Routing(1, Scoring.SOFTMAX_OF_CHOSEN), fields.integer(size)
        experts = reading.experts(fields, routing, size="intermediate_size", shared=shared)
        model = replace(_model(fields, experts, rotates=rotates), tensors=_WITH_SHARED)
    else:
        model = _model(fields, reading.gated(fields, size=size), rotates=rotates)
    types = _layer_types(fields)
    if _MAMBA not in types:
        return model
    mamba = mamba_2(fields)
    layers = (
        replace(own, mixer=mamba) if kind == _MAMBA else own for kind, own in zip(types, model.layers, strict=True)
    )
    return replace(model, layers=tuple(layers))


def _layer_types(fields: ConfigJson) -> list[str]:
    """Checkpoints say "mamba" and "attention", where transformers writes names of its own."""
    name = reading.one_of(fields, "layer_types", "layers_block_type")
    names = {"attention": reading.FULL, reading.FULL: reading.FULL, "mamba": _MAMBA, _MAMBA: _MAMBA}
    types = fields.texts(name) or [_MAMBA] * fields.integer("num_hidden_layers")
    return [names[each] for each in reading.checked_types(fields, types, names, name)]


_EXPERTS = TensorNames(
    names={**LLAMA_NORMS, "mlp.gate": "block_sparse_moe.router.layer"},
    stacked_experts={
        "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
        "block_sparse_moe.output_linear.weight": ("down_proj",),
        **stacked_names("block_sparse_moe.experts"),
    },
    adapter_names={"mlp.gate": "block_sparse_moe.router"},
)
_ROUTER = {"mlp.gate": "block_sparse_moe.router"}
_WITH_SHARED = replace(
    _EXPERTS,
    names={**_EXPERTS.names, "mlp.shared_expert.down_proj": "shared_mlp.output_linear"},
    fused={"shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")},
)

GRANITE = Family(
    "Granite 3",
    ("GraniteForCausalLM",),
    _read,
    Defaults("GraniteConfig"),
    nulls=("num_key_value_heads",),
)
DOCLING_TEXT = replace(
    GRANITE,
    title="Granite Docling (text)",
    architectures=(),
    defaults=Defaults("GraniteDoclingTextConfig"),
)
_HYBRID = {**LLAMA_NORMS, "mlp.down_proj": "shared_mlp.output_linear"}
GRANITE_4 = Family(
    "Granite 4",
    ("GraniteMoeHybridForCausalLM",),
    _read_hybrid,
    Defaults("GraniteMoeHybridConfig"),
    TensorNames(names=_HYBRID, fused={"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")}),
    notes="models without a layer of attention are refused",
    nulls=("num_key_value_heads",),
)
GRANITE_MOE = Family(
    "Granite-MoE",
    ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    _read_experts,
    Defaults("GraniteMoeConfig"),
    _EXPERTS,
    nulls=("num_key_value_heads",),
)
GRANITE_SWA = Family(
    "Granite SWA",
    ("GraniteSWAForCausalLM",),
    _read_windows,
    Defaults("GraniteSWAConfig"),
    nulls=("num_key_value_heads",),
)
GRANITE_MOE_SWA = Family(
    "Granite-MoE SWA",
    ("GraniteMoeSWAForCausalLM",),
    _read_windows_experts,
    Defaults("GraniteMoeSWAConfig"),
    nulls=("num_key_value_heads",),
)
