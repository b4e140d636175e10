"""OLMo Hybrid: layers of Gated DeltaNet, with norms before their parts, and every fourth layer attention as OLMo 3 has
it, with norms after its parts.

Tests: tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.recurrent import GatedDeltaSpec
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import AFTER_NORMS, JOINED_CONVS, TensorNames
from . import reading, rotary
from .defaults import Defaults

_LINEAR = "linear_attention"


def _read(fields: ConfigJson) -> ModelConfig:
    rope = _rope(fields, reading.heads(fields).head_dim)
    attention = rotary.attention(fields, rope=rope, head_norm=HeadNorm.ALL)
    feed_forward = reading.gated(fields)
    reading.check_silu(fields, "Gated DeltaNet")
    layers = {
        reading.FULL: DecoderLayer(attention, feed_forward, Norms.AFTER),
        _LINEAR: DecoderLayer(_delta(fields, attention.num_heads), feed_forward),
    }
    types = _layer_types(fields)
    return reading.dense(fields, [layers[kind] for kind in types], reading.rms_norm(fields, wide=True))


def _layer_types(fields: ConfigJson) -> list[str]:
    """By default the last layer has attention where none of every fourth does."""
    types = reading.layer_types(fields, 4, other=_LINEAR)
    return types if fields.texts("layer_types") or reading.FULL in types else [*types[:-1], reading.FULL]


def _rope(fields: ConfigJson, head_dim: int) -> RopeConfig | None:
    """Where `rope_theta` is null, as in published checkpoints, nothing is rotated."""
    inner = rotary.rope_fields(fields)
    holder = inner if "rope_theta" in inner.raw else fields
    return None if holder.is_null("rope_theta") else rotary.rope(fields, head_dim)


def _delta(fields: ConfigJson, num_heads: int) -> GatedDeltaSpec:
    k_heads = fields.optional("linear_num_key_heads") or num_heads
    v_heads = fields.optional("linear_num_value_heads") or num_heads
    if v_heads % k_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads, {k_heads}, is needed")
    k_dim = fields.optional("linear_key_head_dim") or int(0.75 * fields.integer("hidden_size") / k_heads)
    return GatedDeltaSpec(
        k_heads,
        v_heads,
        k_dim,
        fields.optional("linear_value_head_dim") or 2 * k_dim,
        eps=1e-5,
        conv_size=fields.integer("linear_conv_kernel_dim", least=2),
        beta=2.0 if fields.boolean("linear_allow_neg_eigval") else 1.0,
        parted=True,
    )


OLMO_HYBRID = Family(
    "OLMo Hybrid",
    ("OlmoHybridForCausalLM",),
    _read,
    Defaults("OlmoHybridConfig"),
    TensorNames(
        names={
            **AFTER_NORMS,
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            **{f"linear_attn.in_proj_{each}": f"linear_attn.{each}_proj" for each in "ba"},
            "linear_attn.in_proj_z": "linear_attn.g_proj",
            "linear_attn.out_proj": "linear_attn.o_proj",
            "linear_attn.norm": "linear_attn.o_norm",
        },
        older={
            "attention_norm": "attention_layer_norm",
            "mlp_norm": "feedforward_layer_norm",
            "attention_out_norm": "feedforward_layer_norm",
        },
        joined=JOINED_CONVS,
    ),
    nulls=(
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "num_key_value_heads",
    ),
)
