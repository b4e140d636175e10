"""gpt-oss: experts with biases and a clamped activation, sinks in attention, and windows in every other layer."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import ClampedSwiglu, Routing, Scoring
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, sinks=True)
    experts = reading.experts(
        fields,
        Routing(1, Scoring.SOFTMAX_OF_CHOSEN, bias=True),
        size="intermediate_size",
        activation=ClampedSwiglu(fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
        biased=True,
    )
    mixers = rotary.of_types(fields, attention, reading.layer_types(fields, 2))
    return reading.decoder(fields, mixers, experts, reading.rms_norm(fields, wide=True))


GPT_OSS = Family(
    "gpt-oss",
    ("GptOssForCausalLM",),
    _read,
    Defaults("GptOssConfig"),
    TensorNames(
        names={**LLAMA_NORMS, "mlp.gate": "mlp.router"},
        alternates=True,
        transposed=True,
        adapter_names={f"self_attn.{name}": f"attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    ),
)
