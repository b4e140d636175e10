"""LFM2: layers of gated short convolutions, with layers of attention between them.

LFM2-MoE has a mixture of experts in all layers but the first ones.

Tests: tests/core/layers/test_hybrids.py, tests/core/test_experts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Experts, GatedSpec, Routing, Scoring
from ..specs.norms import NormSpec
from ..specs.recurrent import ShortConvSpec
from ..specs.tensor_names import TensorNames
from ..specs.vision import PROJECTED, SEES
from . import reading, rotary
from .defaults import Defaults

_CONV = "conv"


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
    heads = reading.heads(fields)
    attention = AttentionSpec(
        *heads, scale=heads.head_dim**-0.5, rope=rotary.rope(fields, heads.head_dim), head_norm=HeadNorm.EACH
    )
    conv = ShortConvSpec(
        fields.integer("hidden_size"),
        conv_size=fields.integer("conv_L_cache", least=2),
        bias=fields.boolean("conv_bias"),
    )
    mixers = {reading.FULL: attention, _CONV: conv}
    types = zip(_layer_types(fields), feed_forward, strict=True)
    layers = [DecoderLayer(mixers[kind], each) for kind, each in types]
    tied = "tie_embedding" if "tie_embedding" in fields.raw else "tie_word_embeddings"
    norm = NormSpec(fields.number("norm_eps"))
    return reading.dense(fields, layers, norm, tie_word_embeddings=fields.boolean(tied))


def _layer_types(fields: ConfigJson) -> list[str]:
    if fields.has("layer_types") or not fields.has("full_attn_idxs"):
        return reading.layer_types(fields, 1, other=_CONV)
    attends = fields.indices("full_attn_idxs")
    return [reading.FULL if index in attends else _CONV for index in range(fields.integer("num_hidden_layers"))]


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
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
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
    vision=replace(
        PROJECTED,
        arguments=("pixel_values", "spatial_shapes", "pixel_attention_mask"),
        token=396,
    ),
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
            "mlp.experts.{}.gate_proj": "feed_forward.experts.{}.w1",
            "mlp.experts.{}.up_proj": "feed_forward.experts.{}.w3",
            "mlp.experts.{}.down_proj": "feed_forward.experts.{}.w2",
        },
        stacked_experts={
            "feed_forward.experts.gate_up_proj": ("gate_proj", "up_proj"),
            "feed_forward.experts.down_proj": ("down_proj",),
        },
    ),
)
