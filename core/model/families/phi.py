"""Phi-3, Phi-3.5 mini and Phi-4: q, k and v are one projection, and so are gate and up.

Phi-1, 1.5 and 2 have attention and a feed-forward part without a gate side by side, and biases everywhere.
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import Norms
from ..specs.tensor_names import FUSED_GATE_UP, FUSED_QKV, TensorNames
from . import reading, rotary
from .defaults import Defaults

_ROPE_NAMES = {"su": "longrope", "yarn": "longrope"}


def _read(fields: ConfigJson) -> ModelConfig:
    heads = reading.heads(fields)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rotary.rope(fields, heads.head_dim, names=_ROPE_NAMES, types=("default", "longrope")),
        window=fields.optional("sliding_window"),
    )
    layer = DecoderLayer(attention, reading.gated(fields))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


def _read_2(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("qk_layernorm"):
        raise fields.refuse("qk_layernorm", "norms of heads are not supported for this family")
    heads = reading.heads(fields)
    rope = rotary.rope(fields, heads.head_dim)
    attention = AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope, qkv_bias=True, o_bias=True)
    feed_forward = reading.ungated(fields, default=UngatedActivation.GELU_TANH, bias=True)
    layers = [DecoderLayer(attention, feed_forward, Norms.PARALLEL)] * fields.integer("num_hidden_layers")
    return reading.dense(fields, layers, reading.layer_norm(fields, "layer_norm_eps"), head_bias=True)


PHI_3 = Family(
    "Phi-3 and Phi-4",
    ("Phi3ForCausalLM",),
    _read,
    Defaults("Phi3Config"),
    TensorNames(fused={**FUSED_QKV, **FUSED_GATE_UP}),
    notes="with longrope, up to the original positions unless `--max-model-len` asks for more",
    nulls=("num_key_value_heads",),
)
PHI_4_MULTIMODAL = replace(
    PHI_3,
    title="Phi-4 Multimodal (text)",
    architectures=("Phi4MultimodalForCausalLM",),
    defaults=Defaults("Phi4MultimodalConfig", takes=("bos_token_id",)),
    tensors=replace(PHI_3.tensors, left_out=("model.embed_tokens_extend.",)),
    notes=f"text only; {PHI_3.notes}",
)
PHI_2 = Family(
    "Phi-1, 1.5 and 2",
    ("PhiForCausalLM",),
    _read_2,
    Defaults("PhiConfig", takes=("intermediate_size",)),
    TensorNames(
        norm="final_layernorm",
        names={
            "attention_norm": "input_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
    ),
    notes="adapters with a copy of the output projection are refused, as it has a bias",
    nulls=("num_key_value_heads",),
)
