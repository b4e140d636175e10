"""EXAONE 4: norms after each part, norms of heads, and in models with windows no rope in the layers without one.

K-EXAONE has norms before each part, and DeepSeek-V3's experts. EXAONE 3 and 3.5 are Llama under other names.

Tests: tests/core/test_families.py, tests/core/test_experts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.tensor_names import AFTER_NORMS, CORRECTION, LLAMA_TENSORS, TEXT_AND_IMAGES, TensorNames
from . import glm_moe, llama, reading, rotary
from .defaults import Defaults


def attentions(fields: ConfigJson, pattern: int) -> list[AttentionSpec]:
    """Norms of heads, and no rope in layers of full attention beside others with a window.

    pattern: by default every `pattern`-th layer has full attention.
    """
    attention = rotary.attention(fields, bias=False, head_norm=HeadNorm.EACH)
    types = reading.layer_types(fields, pattern)
    in_full = attention.rope if reading.checked_window(fields, types) is None else None
    return rotary.of_types(fields, attention, types, {reading.FULL: in_full, reading.SLIDING: attention.rope})


def _read(fields: ConfigJson) -> ModelConfig:
    return reading.decoder(fields, attentions(fields, _pattern(fields)), reading.gated(fields), norms=Norms.AFTER)


def _read_3(fields: ConfigJson) -> ModelConfig:
    return llama.LLAMA.read(reading.renamed(fields, _FIELDS_3))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    experts = reading.experts(fields, reading.routing_in_groups(fields), shared="num_shared_experts")
    mixers, has_experts = attentions(fields, _pattern(fields)), reading.mlp_layer_types(fields)
    return reading.decoder(fields, mixers, experts, has_experts=has_experts, tensors=_EXPERTS)


def _pattern(fields: ConfigJson) -> int:
    """`sliding_window_pattern`: a number, or letters such as "LLLG"; 1 without a window."""
    if not fields.is_missing("layer_types") or fields.optional("sliding_window") is None:
        return 1
    pattern = fields.raw.get("sliding_window_pattern")
    return len(pattern) if isinstance(pattern, str) and pattern else fields.integer("sliding_window_pattern")


_FIELDS_3 = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_EXPERTS = replace(
    glm_moe.TENSORS,
    names={**glm_moe.NAMES, CORRECTION: "mlp.e_score_correction_bias"},
    left_out=("mtp.",),
)

EXAONE_4 = Family(
    "EXAONE 4",
    ("Exaone4ForCausalLM",),
    _read,
    Defaults("Exaone4Config"),
    TensorNames(names=AFTER_NORMS),
    nulls=("sliding_window_pattern",),
)
EXAONE_4_5 = Family(
    "EXAONE 4.5 (text)",
    ("Exaone4_5_ForConditionalGeneration",),
    _read,
    Defaults("Exaone4Config"),
    replace(TEXT_AND_IMAGES, names=AFTER_NORMS, left_out=(*TEXT_AND_IMAGES.left_out, "mtp.")),
    notes="draft layers (`mtp`) are left out",
    nulls=("sliding_window_pattern",),
)
EXAONE_MOE = Family(
    "K-EXAONE",
    ("ExaoneMoeForCausalLM",),
    _read_experts,
    Defaults("ExaoneMoeConfig", takes=("intermediate_size",)),
    notes="draft layers (`mtp`) are left out",
    nulls=("sliding_window_pattern",),
)
_NAMES_3 = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    **{f"self_attn.{each}_proj": f"attn.attention.{each}_proj" for each in "qkv"},
    "self_attn.o_proj": "attn.attention.out_proj",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}
_PUBLISHED_3 = TensorNames(prefixes=("transformer.",), norm="ln_f", embeddings="wte", layers="h", names=_NAMES_3)
EXAONE_3 = Family(
    "EXAONE 3 and 3.5",
    ("ExaoneForCausalLM",),
    _read_3,
    Defaults("ExaoneConfig", takes=("intermediate_size",)),
    replace(LLAMA_TENSORS, published=(_PUBLISHED_3, replace(LLAMA_TENSORS, names=_NAMES_3))),
    model_types=("exaone",),
    nulls=("head_dim", "num_key_value_heads"),
)
