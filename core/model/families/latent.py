"""Readers for families with latent attention; see `LatentSpec`. Of some an indexer chooses tokens: `IndexerSpec`.

Tests: tests/core/layers/test_latents.py, tests/core/layers/test_indexer.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, LatentSpec, TemperatureTuning
from ..specs.indexer import IndexerSpec
from ..specs.rope_config import RopeConfig
from . import reading, rotary

#: Of the norms of latents, whatever the model's others have.
_EPS = 1e-6


#: Kinds of layers: one has an indexer of its own, the other attends to the tokens that the last indexer chose.
FULL, SHARED = "full", "shared"

#: A field with a letter, or a type, for each layer.
_PATTERN, _LETTERS = "index_topk_pattern", {"F": FULL, "S": SHARED}

#: Fields of a schedule of layers with an indexer, without `index_`, and transformers' defaults.
_SCHEDULE = {"topk_freq": 1, "skip_topk_offset": 2}

#: Names of the only type of such a layer.
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")


def attention(
    fields: ConfigJson,
    *,
    interleaved: bool = False,
    scaling: TemperatureTuning | None = None,
    rotates: bool = True,
    of: ConfigJson | None = None,
) -> AttentionSpec:
    """interleaved: how rotated elements are paired. rotates: False: they are not rotated, whatever their name (Kimi
    Linear). of: the object of the rope, where layers have several; it has no factor of scores then.
    """
    heads, q_rank = fields.integer("num_attention_heads"), fields.optional("q_lora_rank") or 0
    kv_heads = fields.optional("num_key_value_heads") or heads
    if kv_heads != heads:
        raise fields.refuse("num_key_value_heads", f"latents serve all heads, and num_attention_heads is {heads}")
    kv_rank, key_dim, value_dim = map(fields.integer, ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    rotated_dim = fields.integer("qk_rope_head_dim", least=1 if rotates else 0)
    if rotates and rotated_dim % 2:
        raise fields.refuse("qk_rope_head_dim", "rotary embedding needs an even one")
    bias = fields.boolean("attention_bias")
    if bias and not q_rank:
        raise fields.refuse(
            "attention_bias", "biases are not supported where queries have no latents (q_lora_rank is null or 0)"
        )
    rope = _rope(fields, key_dim, rotated_dim, interleaved=interleaved) if rotates and of is None else None
    rope = rope if of is None else rotary.rope_of_type(fields, rotated_dim, of, interleaved=interleaved)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=kv_rank + rotated_dim,
        scale=(key_dim + rotated_dim) ** -0.5 if rope is None or of else _scale(fields, rope, key_dim + rotated_dim),
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        log_scaling=scaling,
        latent=LatentSpec(q_rank, kv_rank, key_dim, rotated_dim, value_dim, _EPS),
    )


def indexed(fields: ConfigJson, *, interleaved: bool, kinds: list[str] | None = None) -> list[AttentionSpec]:
    """Each layer's attention, to the tokens that an indexer chooses. interleaved: how elements of the indexer are
    paired to be rotated; those of attention are interleaved. kinds: of layers, FULL or SHARED; None: all are FULL.
    """
    check_query_latents(fields)
    check_indexed(fields)
    own, count = attention(fields, interleaved=True), fields.integer("num_hidden_layers")
    full = with_indexer(fields, own, interleaved=interleaved)
    shared = replace(full, indexer=None, form="shared")
    return [full if kind == FULL else shared for kind in kinds or [FULL] * count]


def check_indexed(fields: ConfigJson) -> None:
    """Refuse types of layers other than the only one."""
    if types := fields.texts("layer_types"):
        reading.checked_types(fields, types, _INDEXED)


def with_indexer(fields: ConfigJson, mixer: AttentionSpec, *, interleaved: bool) -> AttentionSpec:
    """Latent attention to the tokens that an indexer chooses. interleaved: see `indexed`."""
    assert mixer.rope is not None and mixer.latent is not None, "`attention` rotates latents here"
    size = fields.integer("index_head_dim")
    if size < mixer.latent.rotated_dim:
        raise fields.refuse("index_head_dim", f"qk_rope_head_dim, {mixer.latent.rotated_dim}, of its elements rotate")
    heads, rope = fields.integer("index_n_heads"), replace(mixer.rope, interleaved=interleaved)
    return replace(mixer, top_k=fields.integer("index_topk"), indexer=IndexerSpec(heads, size, rope, _EPS))


def check_query_latents(fields: ConfigJson) -> None:
    """Refuse queries without latents, of a class of transformers that needs them."""
    if fields.is_null("q_lora_rank"):
        raise fields.refuse("q_lora_rank", "queries have latents in this family; a whole number is needed")


def indexer_kinds(fields: ConfigJson, *, may_begin_shared: bool = False) -> list[str]:
    """Which layers have an indexer: by `indexer_types`, `index_topk_pattern` of letters or names, or one in every
    `index_topk_freq` layers after the first `index_skip_topk_offset - 1`, and those themselves. may_begin_shared: the
    first layers may have other mixers.
    """
    count = fields.integer("num_hidden_layers")
    if fields.is_missing("indexer_types") and fields.is_missing(_PATTERN):
        every, offset = (fields.integer(f"index_{name}", by, least=0) for name, by in _SCHEDULE.items())
        kinds = [SHARED if max(layer - offset + 1, 0) % max(every, 1) else FULL for layer in range(count)]
        return _checked(kinds, fields, "index_topk_freq", may_begin_shared=may_begin_shared)
    name = _PATTERN if fields.is_missing("indexer_types") else "indexer_types"
    is_word = name == _PATTERN and isinstance(fields.raw[name], str)
    kinds = [_LETTERS.get(each, each) for each in fields.text(name)] if is_word else fields.texts(name)
    return _checked(kinds, fields, name, may_begin_shared=may_begin_shared)


def _checked(kinds: list[str], fields: ConfigJson, name: str, *, may_begin_shared: bool) -> list[str]:
    """Types of all layers, after a check. name: the field that has them."""
    reading.checked_types(fields, kinds, (FULL, SHARED), name)
    if kinds[0] == SHARED and not may_begin_shared:
        raise fields.refuse(name, f"no layer before the first one has chosen tokens; it must be {FULL}")
    return kinds


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
