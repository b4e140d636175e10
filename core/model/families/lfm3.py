"""LFM3: layers of gated short convolutions, of attention within a window and of full attention, with a gate of each
head's output and with norms around all parts.

Tests: tests/core/layers/test_hybrids.py, tests/core/test_text_parts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm, OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import GatedSpec
from ..specs.norms import Norms, NormSpec
from ..specs.recurrent import ShortConvSpec
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults

_CONV = "conv"


def _read(fields: ConfigJson) -> ModelConfig:
    heads, types, bias = reading.heads(fields), _layer_types(fields), fields.boolean("attention_bias")
    mixers: dict[str, AttentionSpec | ShortConvSpec] = {
        kind: AttentionSpec(
            *heads,
            scale=heads.head_dim**-0.5,
            rope=_rope(fields, kind, heads.head_dim),
            window=reading.checked_window(fields, types) if kind == reading.SLIDING else None,
            head_norm=HeadNorm.EACH,
            qkv_bias=bias,
            o_bias=bias,
            output_gate=OutputGate.PER_HEAD if fields.boolean("use_attention_gate") else None,
        )
        for kind in (reading.FULL, reading.SLIDING)
        if kind in types
    }
    mixers[_CONV] = ShortConvSpec(
        fields.integer("hidden_size"),
        conv_size=fields.integer("conv_L_cache", least=2),
        bias=fields.boolean("conv_bias"),
    )
    feed_forward = GatedSpec(fields.integer("intermediate_size"))
    norms = Norms.AROUND if fields.boolean("use_sandwich_norm") else Norms.BEFORE
    layers = [DecoderLayer(mixers[kind], feed_forward, norms) for kind in types]
    return reading.dense(fields, layers, NormSpec(fields.number(reading.one_of(fields, "norm_eps", "rms_norm_eps"))))


def _layer_types(fields: ConfigJson) -> list[str]:
    """By default of every four layers the first has a window and the third full attention; the very first has none."""
    count, types = fields.integer("num_hidden_layers"), fields.texts("layer_types")
    if not types:
        kinds = (reading.SLIDING, _CONV, reading.FULL, _CONV)
        return [kinds[index % 4] if index else _CONV for index in range(count)]
    known = (reading.FULL, reading.SLIDING, _CONV)
    if unknown := sorted(set(types) - set(known)):
        raise fields.refuse("layer_types", f"{unknown[0]} is not supported; supported: {', '.join(known)}")
    if len(types) != count:
        raise fields.refuse("layer_types", f"{len(types)} types for num_hidden_layers, {count}")
    return types


def _rope(fields: ConfigJson, kind: str, head_dim: int) -> RopeConfig:
    """A rope of the default type rotates whole heads, whatever `partial_rotary_factor` is."""
    ropes = rotary.rope_fields(fields)
    if not ropes.raw and fields.is_missing("rope_parameters"):
        ropes = fields.part("rope_parameters", _ROPES)
    if (own := ropes.object(kind)) is None:
        raise ropes.refuse(kind, "a rope for each type of attention that layers have is needed")
    if rotary.rope_type_of(own) == "default":
        own = own.with_values({"partial_rotary_factor": 1.0})
    return rotary.rope_of_type(fields, head_dim, own, theta=None if fields.has("rope_theta") else 1_000_000.0)


_ROPES = {
    reading.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    reading.FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
_NAMES = {
    "attention_norm": "operator_norm",
    "attention_out_norm": "post_operator_norm",
    "mlp_norm": "ffn_norm",
    "mlp_out_norm": "post_ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_OLDER = {"self_attn.g_proj": "self_attn.gate_proj"}
LFM3 = Family(
    "LFM3",
    ("Lfm3ForCausalLM",),
    _read,
    Defaults("Lfm3Config", takes=("intermediate_size",)),
    TensorNames(norm="embedding_norm", names=_NAMES, older=_OLDER, adapter_names=_OLDER),
)
LFM3_VL = Family(
    "LFM3-VL (text)",
    ("Lfm3VlForConditionalGeneration",),
    _read,
    Defaults("Lfm3Config", takes=("intermediate_size",)),
    replace(
        LFM3.tensors,
        prefixes=("model.language_model.", "language_model.model."),
        heads=("lm_head.weight", "language_model.lm_head.weight"),
        left_out=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
    ),
    notes="text only",
)
