"""LFM2: layers of gated short convolutions, with layers of attention between them.

LFM2-MoE has a mixture of experts in all layers but the first ones.

Tests: tests/core/layers/test_hybrids.py, tests/core/test_experts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Experts, GatedSpec, Routing, Scoring
from ..specs.norms import NormSpec
from ..specs.recurrent import ShortConvSpec
from ..specs.tensor_names import LETTERS, TensorNames, gated_names, stacked_names
from ..specs.vision import PROJECTED, SEES
from . import reading, rotary
from .defaults import Defaults

CONV = "conv"


def _read(fields: ConfigJson) -> ModelConfig:
    feed_forward = GatedSpec(_width(fields))
    return _model(fields, [feed_forward] * fields.integer("num_hidden_layers"))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    routing = Routing(
        1,
        Scoring.SIGMOID,
        renormalised=fields.boolean("norm_topk_prob"),
        epsilon=1e-6,
        factor=fields.number("routed_scaling_factor"),
        corrected=fields.boolean("use_expert_bias"),
    )
    count, first = fields.integer("num_hidden_layers"), fields.integer("num_dense_layers", least=0)
    if first >= count:
        raise fields.refuse("num_dense_layers", f"num_hidden_layers is {count}; a layer with experts is needed")
    fields.states("hidden_act", "silu")
    dense, experts = GatedSpec(fields.integer("intermediate_size")), reading.experts(fields, routing)
    return _model(fields, [dense if index < first else experts for index in range(count)])


def _model(fields: ConfigJson, feed_forward: list[GatedSpec] | list[GatedSpec | Experts]) -> ModelConfig:
    mixers = {reading.FULL: rotary.attention(fields, bias=False, head_norm=HeadNorm.EACH), CONV: short_conv(fields)}
    types = zip(_layer_types(fields), feed_forward, strict=True)
    layers = [DecoderLayer(mixers[kind], each) for kind, each in types]
    tied = "tie_embedding" if "tie_embedding" in fields.raw else "tie_word_embeddings"
    norm = NormSpec(fields.number("norm_eps"))
    return reading.dense(fields, layers, norm, tie_word_embeddings=fields.boolean(tied))


def short_conv(fields: ConfigJson) -> ShortConvSpec:
    """The mixer of layers of gated short convolutions."""
    hidden, size = fields.integer("hidden_size"), fields.integer("conv_L_cache", least=2)
    return ShortConvSpec(hidden, conv_size=size, bias=fields.boolean("conv_bias"))


def _layer_types(fields: ConfigJson) -> list[str]:
    if fields.has("layer_types") or not fields.has("full_attn_idxs"):
        return reading.layer_types(fields, 1, other=CONV)
    attends = fields.indices("full_attn_idxs")
    return [reading.FULL if index in attends else CONV for index in range(fields.integer("num_hidden_layers"))]


def _width(fields: ConfigJson) -> int:
    """Of the feed-forward part: checkpoints give it before it is cut by a third and rounded up."""
    size = fields.integer("block_ff_dim" if "block_ff_dim" in fields.raw else "intermediate_size")
    if not fields.boolean("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if (factor := reading.optional_number(fields, "block_ffn_dim_multiplier")) is None:
        return size
    multiple = fields.integer("block_multiple_of")
    return -(-int(factor * size) // multiple) * multiple


_NAMES = {
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
    **gated_names("mlp", "feed_forward", LETTERS),
}
LFM2 = Family(
    "LFM2",
    ("Lfm2ForCausalLM",),
    _read,
    Defaults("Lfm2Config", takes=("intermediate_size",)),
    TensorNames(norm="embedding_norm", names=_NAMES),
)
LFM2_VL = Family(
    "LFM2-VL",
    ("Lfm2VlForConditionalGeneration",),
    _read,
    Defaults("Lfm2Config", takes=("intermediate_size",)),
    TensorNames(
        prefixes=("model.language_model.", "language_model.model."),
        heads=("lm_head.weight", "language_model.lm_head.weight"),
        norm="embedding_norm",
        names=_NAMES,
        left_out=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
    ),
    notes=SEES,
    vision=replace(PROJECTED, arguments=("pixel_values", "spatial_shapes", "pixel_attention_mask"), token=396),
)
LFM2_MOE = Family(
    "LFM2-MoE",
    ("Lfm2MoeForCausalLM",),
    _read_experts,
    Defaults("Lfm2MoeConfig", takes=("intermediate_size",)),
    TensorNames(
        norm="embedding_norm",
        names={
            **_NAMES,
            "mlp.gate": "feed_forward.gate",
            "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
            **gated_names("mlp.experts.{}", "feed_forward.experts.{}", LETTERS),
        },
        stacked_experts=stacked_names("feed_forward.experts"),
    ),
)
