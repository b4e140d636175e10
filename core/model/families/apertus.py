"""Apertus: Llama with norms of heads, and xIELU in a feed-forward part without a gate.

Apertus 1.5 has embeddings of images and sound, too, of whose tokens there may be no logits.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, head_norm=HeadNorm.EACH)
    return reading.decoder(fields, attention, reading.ungated(fields, default=UngatedActivation.XIELU))


def _read_text(fields: ConfigJson) -> ModelConfig:
    every = fields.integer("vocab_size")
    kept = fields.optional("output_vocab_size") or every
    if kept > every:
        raise fields.refuse("output_vocab_size", f"vocab_size is {every}; it can't be more than that")
    if kept < every and fields.boolean("tie_word_embeddings"):
        raise fields.refuse("tie_word_embeddings", f"the head has {kept} rows, and the embeddings {every}")
    return replace(_read(fields.with_values({"vocab_size": kept})), further_embeddings=every - kept)


APERTUS = Family(
    "Apertus",
    ("ApertusForCausalLM",),
    _read,
    Defaults("ApertusConfig"),
    TensorNames(names={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}),
    nulls=("num_key_value_heads",),
)  # fmt: skip
APERTUS_1_5_TEXT = replace(
    APERTUS,
    title="Apertus 1.5 (text)",
    architectures=("Apertus1p5TextForCausalLM",),
    read=_read_text,
    defaults=Defaults("Apertus1p5TextConfig"),
    nulls=(*APERTUS.nulls, "output_vocab_size"),
)
