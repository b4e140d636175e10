"""Gemma 2: Gemma with norms around each part, windows in every other layer, and soft caps of scores and logits.

VaultGemma norms before each part alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.tensor_names import AROUND_NORMS, TensorNames
from . import gemma, reading, rotary
from .defaults import Defaults


def _reader(norms: Norms) -> Callable[[ConfigJson], ModelConfig]:
    def read(fields: ConfigJson) -> ModelConfig:
        rope = rotary.rope(fields, reading.heads(fields).head_dim)
        ropes = {reading.FULL: rope, reading.SLIDING: rope}
        return gemma.read_layers(fields, ropes, reading.layer_types(fields, 2), norms)

    return read


GEMMA_2 = Family(
    "Gemma 2",
    ("Gemma2ForCausalLM",),
    _reader(Norms.AROUND),
    Defaults("Gemma2Config", takes=("vocab_size",)),
    TensorNames(names=AROUND_NORMS),
    nulls=("final_logit_softcapping",),
)
VAULT_GEMMA = Family(
    "VaultGemma",
    ("VaultGemmaForCausalLM",),
    _reader(Norms.BEFORE),
    Defaults("VaultGemmaConfig", takes=("vocab_size",)),
    TensorNames(names={"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}),
    nulls=("final_logit_softcapping",),
)
