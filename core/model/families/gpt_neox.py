"""GPT-NeoX and Pythia: attention and a feed-forward part without a gate side by side, each with a norm, and biases.

q, k and v are one projection, which has the rows of all three by head. GPT-NeoX Japanese has the parts one after the
other, and a bias in the last layer's attention alone.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import Norms
from ..specs.tensor_names import LLAMA_NORMS, QKV, TensorNames
from . import gpt_2, reading, rotary
from .bloom import DENSE_NAMES
from .defaults import TOKENS, Defaults

_QKV = "attention.query_key_value"


def _read(fields: ConfigJson) -> ModelConfig:
    for name in ("rope_theta", "partial_rotary_factor", "num_key_value_heads"):
        fields = fields.without(name)  # transformers leaves them out, too
    fields = reading.renamed(fields, {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})
    fields.states("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    attention = rotary.attention(fields.without("head_dim"))
    feed_forward = reading.ungated(fields, default=UngatedActivation.GELU, bias=True)
    norms = Norms.PARALLEL_TWO_NORMS if fields.boolean("use_parallel_residual") else Norms.BEFORE
    return reading.decoder(fields, attention, feed_forward, reading.layer_norm(fields, "layer_norm_eps"), norms=norms)


def _read_japanese(fields: ConfigJson) -> ModelConfig:
    fields = gpt_2.alone(fields).without("rope_theta").without("partial_rotary_factor")
    fields = reading.renamed(fields, {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})
    attention, count = rotary.attention(fields, bias=False), fields.integer("num_hidden_layers")
    mixers = [replace(attention, o_bias=at == count - 1) for at in range(count)]
    width = fields.integer("hidden_size") * fields.integer("intermediate_multiple_size")
    fields = fields.with_values({"intermediate_size": width})
    feed_forward = reading.ungated(fields, default=UngatedActivation.GELU)
    return reading.decoder(fields, mixers, feed_forward, reading.layer_norm(fields, "layer_norm_eps"))


_NAMES = TensorNames(
    prefixes=("gpt_neox.", ""),
    heads=("embed_out.weight", "lm_head.weight"),
    norm="final_layer_norm",
    embeddings="embed_in",
    names={**LLAMA_NORMS, "self_attn.o_proj": "attention.dense", **DENSE_NAMES},
    fused={_QKV: QKV},
    by_unit=(_QKV,),
)

GPT_NEOX = Family(
    "GPT-NeoX and Pythia",
    ("GPTNeoXForCausalLM",),
    _read,
    Defaults("GPTNeoXConfig", takes=("intermediate_size",)),
    _NAMES,
)
GPT_NEOX_JAPANESE = Family(
    "GPT-NeoX Japanese",
    ("GPTNeoXJapaneseForCausalLM",),
    _read_japanese,
    Defaults("GPTNeoXJapaneseConfig", takes=TOKENS),
    replace(
        _NAMES,
        prefixes=("gpt_neox_japanese.", ""),
        names={**_NAMES.names, "self_attn.o_proj.bias": "attention.dense_bias"},
    ),
)
