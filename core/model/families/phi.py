"""Phi-3, Phi-3.5 mini and Phi-4: q, k and v are one projection, and so are gate and up.

Phi-1, 1.5 and 2 have attention and a feed-forward part without a gate side by side, and biases everywhere.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.norms import Norms
from ..specs.tensor_names import FUSED_GATE_UP, FUSED_QKV, TensorNames
from . import reading, rotary
from .defaults import Defaults

_ROPE_NAMES = {"su": "longrope", "yarn": "longrope"}


def _read(fields: ConfigJson) -> ModelConfig:
    head_dim = reading.heads(fields).head_dim
    rope = rotary.rope(fields, head_dim, names=_ROPE_NAMES, types=("default", "longrope"))
    attention = rotary.attention(fields, rope=rope, bias=False, window=fields.optional("sliding_window"))
    return reading.decoder(fields, attention, reading.gated(fields))


def _read_2(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("qk_layernorm"):
        raise fields.refuse("qk_layernorm", "norms of heads are not supported for this family")
    attention = rotary.attention(fields, bias=True)
    feed_forward = reading.ungated(fields, default=UngatedActivation.GELU_TANH, bias=True)
    norm = reading.layer_norm(fields, "layer_norm_eps")
    return reading.decoder(fields, attention, feed_forward, norm, norms=Norms.PARALLEL, head_bias=True)


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
