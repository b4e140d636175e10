"""Readers for families with latent attention; see `LatentSpec`."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, LatentSpec, QueryGrowth
from ..specs.rope_config import RopeConfig
from . import reading, rotary

#: Of the norms of latents, whatever the model's others have.
_EPS = 1e-6

#: transformers' defaults of DeepSeek's sizes of latents.
DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "attention_bias": False,
}


def attention(
    fields: ConfigJson, *, interleaved: bool = False, growth: QueryGrowth | None = None, rotates: bool = True
) -> AttentionSpec:
    """interleaved: how rotated elements are paired. rotates: False: they are not rotated, whatever their name (Kimi
    Linear).
    """
    heads, q_rank = fields.integer("num_attention_heads"), fields.optional("q_lora_rank") or 0
    kv_heads = fields.optional("num_key_value_heads") or heads
    if kv_heads != heads:
        raise fields.refuse("num_key_value_heads", f"latents serve all heads, and num_attention_heads is {heads}")
    sizes = (fields.integer(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    kv_rank, key_dim, rotated_dim, value_dim = sizes
    if rotates and rotated_dim % 2:
        raise fields.refuse("qk_rope_head_dim", "rotary embedding needs an even one")
    bias = fields.boolean("attention_bias")
    if bias and not q_rank:
        raise fields.refuse(
            "attention_bias", "biases are not supported where queries have no latents (q_lora_rank is null or 0)"
        )
    rope = _rope(fields, key_dim, rotated_dim, interleaved=interleaved) if rotates else None
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=kv_rank + rotated_dim,
        scale=(key_dim + rotated_dim) ** -0.5 if rope is None else _scale(fields, rope, key_dim + rotated_dim),
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        query_growth=growth,
        latent=LatentSpec(q_rank, kv_rank, key_dim, rotated_dim, value_dim, _EPS),
    )


def check_head_dim(fields: ConfigJson) -> None:
    """Refuse a `head_dim` other than `qk_rope_head_dim` of a class of transformers that takes its rope's size from it
    (DeepSeek-V3).
    """
    rotated = fields.integer("qk_rope_head_dim")
    if fields.raw.get("head_dim") not in (None, rotated):
        raise fields.refuse(
            "head_dim", f"transformers rotates so many elements; qk_rope_head_dim, {rotated}, is supported"
        )


def _rope(fields: ConfigJson, key_dim: int, rotated_dim: int, *, interleaved: bool) -> RopeConfig:
    """The rope, which rotates all of a head's `qk_rope_head_dim` elements. `partial_rotary_factor` is 1, or the share
    of a key that these are.
    """
    scaling = rotary.rope_fields(fields)
    share = reading.optional_number(scaling, "partial_rotary_factor")
    if share is not None and rotated_dim not in (int(rotated_dim * share), round((key_dim + rotated_dim) * share)):
        raise scaling.refuse("partial_rotary_factor", f"all {rotated_dim} elements of qk_rope_head_dim must rotate")
    return rotary.rope(fields, rotated_dim, of=scaling.without("partial_rotary_factor"), interleaved=interleaved)


def _scale(fields: ConfigJson, rope: RopeConfig, head_dim: int) -> float:
    """Factor of the scores; YaRN's grows with its factor."""
    scaling = rotary.rope_fields(fields)
    mscale = reading.optional_number(scaling, "mscale_all_dim")
    if rope.type == "default" or mscale is None:
        return head_dim**-0.5
    return head_dim**-0.5 * rotary.mscale(scaling.number("factor"), mscale) ** 2
