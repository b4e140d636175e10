"""GPT-J and CodeGen: attention and a feed-forward part without a gate side by side, behind one norm, and a bias of the
output projection. Rotary embedding turns neighbouring elements of a part of each head.
"""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import Norms
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import TensorNames
from . import gpt_2, reading
from .defaults import TOKENS, Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    fields = gpt_2.sizes(fields)
    heads = reading.heads(fields)
    turned = fields.optional("rotary_dim") or heads.head_dim
    if turned > heads.head_dim or turned % 2:
        raise fields.refuse("rotary_dim", f"an even number of at most {heads.head_dim}, a head's size, is needed")
    rope = RopeConfig(turned, 10000.0, interleaved=True)
    attention = AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope)
    feed_forward = reading.ungated(fields, "activation_function", default=UngatedActivation.GELU_TANH, bias=True)
    layers = [DecoderLayer(attention, feed_forward, Norms.PARALLEL)] * fields.integer("num_hidden_layers")
    return reading.dense(fields, layers, reading.layer_norm(fields, "layer_norm_epsilon"), head_bias=True)


_NAMES = {
    "attention_norm": "ln_1",
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
}
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
    TensorNames(prefixes=("transformer.", ""), norm="ln_f", embeddings="wte", layers="h", names=_NAMES),
    notes=_NOTES,
    nulls=("n_inner", "rotary_dim"),
)
CODEGEN = Family(
    "CodeGen",
    ("CodeGenForCausalLM",),
    _read_codegen,
    Defaults("CodeGenConfig", {"max_position_embeddings": 2048}, takes=TOKENS),
    TensorNames(
        prefixes=("transformer.", ""),
        norm="ln_f",
        embeddings="wte",
        layers="h",
        names=_NAMES,
        fused={_QKV: ("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj")},
        by_unit=(_QKV,),
        units={_QKV: _PARTS},
    ),
    notes=_NOTES,
    nulls=("n_inner", "rotary_dim"),
)
