"""GPT-J and CodeGen: attention and a feed-forward part without a gate side by side, behind one norm, and a bias of the
output projection. Rotary embedding turns neighbouring elements of a part of each head.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import Norms
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import QKV
from . import gpt_2, reading, rotary
from .defaults import TOKENS, Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    fields = gpt_2.sizes(fields)
    size = reading.heads(fields).head_dim
    turned = fields.optional("rotary_dim") or size
    if turned > size or turned % 2:
        raise fields.refuse("rotary_dim", f"an even number of at most {size}, a head's size, is needed")
    attention = rotary.attention(fields, rope=RopeConfig(turned, 10000.0, interleaved=True), bias=False)
    feed_forward = reading.ungated(fields, "activation_function", default=UngatedActivation.GELU_TANH, bias=True)
    norm = reading.layer_norm(fields, "layer_norm_epsilon")
    return reading.decoder(fields, attention, feed_forward, norm, norms=Norms.PARALLEL, head_bias=True)


_NAMES = replace(
    gpt_2.TENSORS,
    names={
        "attention_norm": "ln_1",
        **{part: part.replace("self_attn", "attn") for part in QKV},
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
    },
)
_NOTES = "adapters with a copy of the output projection are refused, as it has a bias"


def _read_codegen(fields: ConfigJson) -> ModelConfig:
    found = _read(fields)
    if any(each.num_heads % _PARTS for each in found.attention_shapes):
        raise fields.refuse("n_head", f"a multiple of {_PARTS} is needed: q, k and v are stored in so many parts")
    return found


_PARTS = 4
"""Parts of the projection to q, k and v, each with some heads: it was trained on so many devices."""

_QKV = "attn.qkv_proj"

GPT_J = Family(
    "GPT-J",
    ("GPTJForCausalLM",),
    _read,
    Defaults("GPTJConfig", {"max_position_embeddings": 2048}, takes=TOKENS),
    _NAMES,
    notes=_NOTES,
    nulls=("n_inner", "rotary_dim"),
)
CODEGEN = Family(
    "CodeGen",
    ("CodeGenForCausalLM",),
    _read_codegen,
    Defaults("CodeGenConfig", {"max_position_embeddings": 2048}, takes=TOKENS),
    replace(
        _NAMES,
        fused={_QKV: ("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj")},
        by_unit=(_QKV,),
        units={_QKV: _PARTS},
    ),
    notes=_NOTES,
    nulls=("n_inner", "rotary_dim"),
)
