"""LFM3: layers of gated short convolutions, of attention within a window and of full attention, with a gate of each
head's output and with norms around all parts.

Tests: tests/core/layers/test_hybrids.py, tests/core/test_text_parts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm, OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import GatedSpec
from ..specs.norms import Norms, NormSpec
from ..specs.recurrent import ShortConvSpec
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import LETTERS, TensorNames, gated_names
from . import reading, rotary
from .defaults import Defaults
from .lfm2 import CONV, LFM2_VL, short_conv


def _read(fields: ConfigJson) -> ModelConfig:
    types = _layer_types(fields)
    gate = OutputGate.PER_HEAD if fields.boolean("use_attention_gate") else None
    attention = rotary.attention(fields, rope=None, head_norm=HeadNorm.EACH, output_gate=gate)
    attends = [kind for kind in dict.fromkeys(types) if kind != CONV]
    ropes = {kind: _rope(fields, kind, attention.head_dim) for kind in attends}
    of_types = zip(attends, rotary.of_types(fields, attention, attends, ropes), strict=True)
    mixers: dict[str, AttentionSpec | ShortConvSpec] = dict(of_types)
    mixers[CONV] = short_conv(fields)
    feed_forward = GatedSpec(fields.integer("intermediate_size"))
    norms = Norms.AROUND if fields.boolean("use_sandwich_norm") else Norms.BEFORE
    norm = NormSpec(fields.number(reading.one_of(fields, "norm_eps", "rms_norm_eps")))
    return reading.decoder(fields, [mixers[kind] for kind in types], feed_forward, norm, norms=norms)


def _layer_types(fields: ConfigJson) -> list[str]:
    """By default of every four layers the first has a window and the third full attention; the very first has none."""
    count, types = fields.integer("num_hidden_layers"), fields.texts("layer_types")
    if not types:
        kinds = (reading.SLIDING, CONV, reading.FULL, CONV)
        return [kinds[index % 4] if index else CONV for index in range(count)]
    return reading.checked_types(fields, types, (reading.FULL, reading.SLIDING, CONV))


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
    **gated_names("mlp", "feed_forward", LETTERS),
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
    replace(LFM2_VL.tensors, names=_NAMES, older=_OLDER, adapter_names=_OLDER),
    notes="text only",
)
