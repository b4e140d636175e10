"""DBRX: LayerNorms without a bias, clipped queries, keys and values, and experts in flat matrices.

Tests: tests/core/test_experts.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.norms import NormKind, NormSpec
from ..specs.tensor_names import QKV
from . import gpt_2, reading, rotary
from .defaults import Defaults

_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
#: transformers' defaults of `ffn_config`.
_EXPERTS = {"moe_num_experts": 4, "ffn_hidden_size": 3584, "moe_top_k": 1}


def _read(fields: ConfigJson) -> ModelConfig:
    attention_fields = fields.object("attn_config") or fields.part("attn_config", {})
    feed_forward = fields.object("ffn_config") or fields.part("ffn_config", {})
    if fields.boolean("tie_word_embeddings"):
        raise fields.refuse("tie_word_embeddings", "transformers refuses it for this family; only false is supported")
    named = reading.renamed(fields, _NAMES)
    fields, given = gpt_2.alone(named), named.optional("head_dim")
    kv_heads = attention_fields.integer("kv_n_heads", 1)
    clip = reading.optional_number(attention_fields, "clip_qkv")
    attention = rotary.attention(fields.with_values({"num_key_value_heads": kv_heads}), bias=False, clip=clip)
    if given not in (None, attention.head_dim):
        raise named.refuse("head_dim", f"transformers rotates so many elements, and a head has {attention.head_dim}")
    experts = reading.experts(
        feed_forward.with_values({"hidden_act": _activation(feed_forward)}).with_defaults(_EXPERTS),
        Routing(1, renormalised=_renormalised(feed_forward)),
        size="ffn_hidden_size",
        per_token="moe_top_k",
    )
    return reading.decoder(fields, attention, experts, NormSpec(1e-5, NormKind.LAYER, wide=True))


def _activation(fields: ConfigJson) -> str:
    """The name in `ffn_act_fn`."""
    own = fields.object("ffn_act_fn")
    return "silu" if own is None else own.text("name")


def _renormalised(fields: ConfigJson) -> bool:
    """Experts' weights are divided by a norm of them."""
    name = "moe_normalize_expert_weights"
    if fields.is_null(name):
        return False
    if fields.number(name, 1.0) != 1:
        raise fields.refuse(name, "only norms of the order 1, sums, are supported; and null, for none")
    return True


DBRX = Family(
    "DBRX",
    ("DbrxForCausalLM",),
    _read,
    Defaults(
        "DbrxConfig",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "max_position_embeddings": 2048},
        takes=("vocab_size",),
    ),
    replace(
        gpt_2.TENSORS,
        norm="norm_f",
        layers="blocks",
        names={
            "attention_norm": "norm_attn_norm.norm_1",
            "mlp_norm": "norm_attn_norm.norm_2",
            "self_attn.o_proj": "norm_attn_norm.attn.out_proj",
            "mlp.gate": "ffn.router.layer",
        },
        fused={"norm_attn_norm.attn.Wqkv": QKV},
        stacked_experts={
            "ffn.experts.mlp.w1": ("gate_proj",),
            "ffn.experts.mlp.v1": ("up_proj",),
            "ffn.experts.mlp.w2": ("down_proj",),
        },
        flat=True,
    ),
    notes="adapters on experts are refused, as PEFT has none of each; `attn_config.rope_theta` has no effect",
    nulls=("clip_qkv", "ffn_act_fn", "moe_normalize_expert_weights", "moe_jitter_eps"),
)
