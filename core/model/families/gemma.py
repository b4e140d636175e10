"""Gemma 1, and the parts that all versions share: scaled embeddings, norms with weights of 1 + w, GELU."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.rope_config import RopeConfig
from . import reading, rotary
from .defaults import Defaults


def read_layers(
    fields: ConfigJson,
    ropes: dict[str, RopeConfig],
    types: list[str],
    norms: Norms,
    head_norm: HeadNorm | None = None,
    *,
    activation: str = "hidden_activation",
) -> ModelConfig:
    """A Gemma of any version. types: of its layers, each with its rope. activation: the field that names it."""
    if fields.raw.get("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "only causal attention is supported")
    size = reading.heads(fields).head_dim
    scale = fields.integer("query_pre_attn_scalar") if fields.states("query_pre_attn_scalar", size) else size
    softcap = reading.softcap(fields, "attn_logit_softcapping")
    attention = rotary.attention(fields, rope=None, scale=scale**-0.5, softcap=softcap, head_norm=head_norm)
    return reading.decoder(
        fields,
        rotary.of_types(fields, attention, types, ropes),
        reading.gated(fields, activation),
        reading.rms_norm(fields, one_plus=True),
        norms=norms,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logits_softcap=reading.softcap(fields, "final_logit_softcapping"),
    )


def _read(fields: ConfigJson) -> ModelConfig:
    rope = rotary.rope(fields, reading.heads(fields).head_dim)
    if fields.raw.get("hidden_act") == "gelu":  # as first published; transformers takes it for its approximation
        fields = fields.with_values({"hidden_act": "gelu_pytorch_tanh"})
    types = [reading.FULL] * fields.integer("num_hidden_layers")
    return read_layers(fields, {reading.FULL: rope}, types, Norms.BEFORE, activation="hidden_act")


GEMMA = Family(
    "Gemma",
    ("GemmaForCausalLM",),
    _read,
    Defaults("GemmaConfig", {"sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh"}, takes=("vocab_size",)),
)
