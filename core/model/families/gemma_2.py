"""Gemma 2: Gemma with norms around each part, windows in every other layer, and soft caps of scores and logits.

VaultGemma norms before each part alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family, text_shape
from ..specs.norms import Norms
from ..specs.tensor_names import AROUND_NORMS, TensorNames
from . import gemma, reading, rotary


def _reader(norms: Norms) -> Callable[[ConfigJson], ModelConfig]:
    def read(fields: ConfigJson) -> ModelConfig:
        rope = rotary.rope(fields, reading.heads(fields).head_dim)
        ropes = {reading.FULL: rope, reading.SLIDING: rope}
        return gemma.read_layers(fields, ropes, reading.layer_types(fields, 2), norms)

    return read


_DEFAULTS = {
    **gemma.DEFAULTS,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

GEMMA_2 = Family(
    "Gemma 2",
    ("Gemma2ForCausalLM",),
    _reader(Norms.AROUND),
    _DEFAULTS,
    TensorNames(names=AROUND_NORMS),
    nulls=("final_logit_softcapping",),
    shape=text_shape(256000, 2304, 9216, 26, 8),
)
VAULT_GEMMA = Family(
    "VaultGemma",
    ("VaultGemmaForCausalLM",),
    _reader(Norms.BEFORE),
    _DEFAULTS,
    TensorNames(names={"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}),
    nulls=("final_logit_softcapping",),
)
