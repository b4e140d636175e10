"""The configuration of a small Llama; tests replace the fields that they need."""

from __future__ import annotations

from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.specs.attention import AttentionSpec
from chorus.core.model.specs.config import ModelConfig
from chorus.core.model.specs.feed_forward import GatedSpec
from chorus.core.model.specs.norms import NormSpec
from chorus.core.model.specs.rope_config import RopeConfig

LLAMA = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=96,
    hidden_size=32,
    layers=(DecoderLayer(AttentionSpec(2, 1, 16, 0.25, RopeConfig(16), qkv_bias=False), GatedSpec(48)),) * 2,
    norm=NormSpec(1e-5),
    max_position_embeddings=64,
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_ids=(),
)
