"""gpt-oss: experts with biases and a clamped activation, sinks in attention, and windows in every other layer."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import ClampedSwiglu, Routing, Scoring
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads, bias, types = reading.heads(fields), fields.boolean("attention_bias"), reading.layer_types(fields, 2)
    window = reading.checked_window(fields, types)
    rope = rotary.rope(fields, heads.head_dim)
    experts = reading.experts(
        fields,
        Routing(1, Scoring.SOFTMAX_OF_CHOSEN, bias=True),
        size="intermediate_size",
        activation=ClampedSwiglu(fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
        biased=True,
    )
    layers = [
        DecoderLayer(
            AttentionSpec(
                *heads,
                scale=heads.head_dim**-0.5,
                rope=rope,
                window=window if seen == reading.SLIDING else None,
                qkv_bias=bias,
                o_bias=bias,
                sinks=True,
            ),
            experts,
        )
        for seen in types
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields, wide=True))


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
