"""Gemma 2: Gemma with norms around each part, windows in every other layer, and soft caps of scores and logits."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import Norms
from ..tensor_names import AROUND_NORMS, TensorNames
from . import gemma, reading


def _read(fields: ConfigJson) -> ModelConfig:
    rope = reading.rope(fields, reading.heads(fields).head_dim)
    ropes = {reading.FULL: rope, reading.SLIDING: rope}
    return gemma.read_layers(fields, ropes, reading.layer_types(fields, 2), Norms.AROUND)


GEMMA_2 = Family(
    "Gemma 2",
    ("Gemma2ForCausalLM",),
    _read,
    {**gemma.DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    TensorNames(names=AROUND_NORMS),
)
