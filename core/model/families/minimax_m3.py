"""MiniMax-M3: layers whose queries attend to blocks of keys that an indexer chooses, gpt-oss's activation, and
MiniMax-M2's experts beside a shared one.

Tests: tests/core/layers/test_key_blocks.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import ClampedSwiglu, GatedSpec
from ..specs.indexer import BlockIndexerSpec
from ..specs.tensor_names import (
    CORRECTION,
    FUSED_GATE_UP,
    LETTERS,
    LLAMA_NORMS,
    SHARED_EXPERTS,
    TensorNames,
    gated_names,
)
from . import reading, rotary
from .defaults import Defaults
from .reading import FULL

SPARSE = "minimax_m3_sparse"

#: Older names of the indexer's fields, in an object of their own, which come first in transformers.
_OLDER = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
_SCHEDULE = "sparse_attention_freq"


def _read(fields: ConfigJson) -> ModelConfig:
    fields, types = _with_indexer(fields)
    full = rotary.attention(fields, bias=False, head_norm=HeadNorm.EACH)
    sparse = _sparse(fields, full) if SPARSE in types else full
    activation = ClampedSwiglu(fields.number("swiglu_alpha"), fields.number("swiglu_limit"))
    experts = reading.experts(
        fields,
        reading.sigmoid_routing(fields, "routed_scaling_factor"),
        size="intermediate_size",
        shared=fields.integer("shared_intermediate_size"),
        activation=activation,
    )
    dense = GatedSpec(fields.integer("dense_intermediate_size"), activation)
    has_experts = _has_experts(fields)
    layers = [
        DecoderLayer(sparse if kind == SPARSE else full, experts if has else dense)
        for kind, has in zip(types, has_experts, strict=True)
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields, one_plus=True))


def _with_indexer(fields: ConfigJson) -> tuple[ConfigJson, list[str]]:
    """The fields, with those of the indexer under their own names, and types of layers."""
    count, types, older = fields.integer("num_hidden_layers"), fields.texts("layer_types"), _older(fields)
    fields = fields.with_values({name: older.raw[old] for name, old in _OLDER.items() if old in older.raw})
    if not types and _SCHEDULE in older.raw:
        types = [SPARSE if each else FULL for each in older.indices(_SCHEDULE)]
    return fields, reading.checked_types(fields, types or [FULL] * count, (FULL, SPARSE))


def _older(fields: ConfigJson) -> ConfigJson:
    """The object with older names of fields; empty where there is none."""
    name = "sparse_attention_config"
    return fields.object(name) or fields.part(name, {})


def _sparse(fields: ConfigJson, full: AttentionSpec) -> AttentionSpec:
    assert full.rope is not None, "the family rotates"
    heads, size = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    if heads != full.num_kv_heads:
        raise fields.refuse("index_n_heads", f"each of num_key_value_heads, {full.num_kv_heads}, needs one")
    if size < full.rope.dim:
        raise fields.refuse("index_head_dim", f"{full.rope.dim} of its elements rotate")
    block, top = fields.integer("index_block_size"), fields.integer("index_topk_blocks")
    if (local := fields.integer("index_local_blocks", least=0)) > top:
        raise fields.refuse("index_local_blocks", f"index_topk_blocks is {top}; any of so many would be chosen")
    index = BlockIndexerSpec(heads, size, full.rope, block, top, local)
    return replace(full, block_indexer=index, top_k=index.top_k)


def _has_experts(fields: ConfigJson) -> list[bool]:
    """Which layers have experts: by `mlp_layer_types`, or by `moe_layer_freq`, a number for each; by default all."""
    if fields.is_missing("mlp_layer_types") and not fields.is_missing("moe_layer_freq"):
        numbers = fields.indices("moe_layer_freq")
        if len(numbers) != (count := fields.integer("num_hidden_layers")):
            raise fields.refuse("moe_layer_freq", f"{len(numbers)} numbers for num_hidden_layers, {count}")
        return list(map(bool, numbers))
    return reading.mlp_layer_types(fields, 0)


_INDEX = ("q_norm", "k_norm")

#: As published: projections are apart, and experts in a part of another name.
_PUBLISHED = TensorNames(
    prefixes=("language_model.model.",),
    heads=("language_model.lm_head.weight",),
    names={
        **LLAMA_NORMS,
        **{f"self_attn.indexer.{part}": f"self_attn.index_{part}" for part in ("q_proj", "k_proj", *_INDEX)},
        **gated_names("mlp.shared_expert", "block_sparse_moe.shared_experts"),
        "mlp.gate": "block_sparse_moe.gate",
        CORRECTION: "block_sparse_moe.e_score_correction_bias",
        **gated_names("mlp.experts.{}", "block_sparse_moe.experts.{}", LETTERS),
    },
)
_PARTS = ("vision_tower", "multi_modal_projector", "patch_merge_mlp", "mtp")
_TENSORS = TensorNames(
    prefixes=("model.language_model.", "model."),
    names={**LLAMA_NORMS, **SHARED_EXPERTS},
    fused={
        **FUSED_GATE_UP,
        "mlp.shared_experts.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    },
    left_out=tuple(f"{outer}{part}." for outer in ("", "model.", "language_model.") for part in _PARTS),
    published=(_PUBLISHED,),
)

MINIMAX_M3 = Family(
    "MiniMax-M3",
    ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
    _read,
    Defaults("MiniMaxM3VLTextConfig", {"partial_rotary_factor": 1.0}, takes=("intermediate_size",)),
    _TENSORS,
    notes="pages keep keys of the indexer that chooses blocks of tokens; draft layers are left out",
)
