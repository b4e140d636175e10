"""Arguments of the native decoder's attention ops.

Tests: tests/core/model/program/test_native_decoder.py
"""

from __future__ import annotations

from typing import Any

import torch

from ....ops.library.native_descriptors import NativeHeadNorm, NativeOutputGate
from ....ops.library.native_model import LatentShape
from ..specs.attention import AttentionSpec, HeadNorm, LatentSpec, OutputGate
from ..specs.indexer import BlockIndexerSpec
from ..specs.norms import NormSpec
from ..specs.rope_config import RopeConfig
from .native_binding import Late, LayerBinding, score_scale, weight_of
from .op import NoNativeOp

#: The library's names of where gates are.
OUTPUT_GATES = {
    None: NativeOutputGate.NONE,
    OutputGate.BESIDE_QUERIES: NativeOutputGate.BESIDE_QUERIES,
    OutputGate.PER_HEAD: NativeOutputGate.PER_HEAD,
    OutputGate.PER_ELEMENT: NativeOutputGate.PER_ELEMENT,
}

_HEAD_NORMS: dict[HeadNorm | None, NativeHeadNorm] = {
    HeadNorm.ALL: NativeHeadNorm.ALL,
    HeadNorm.OWN: NativeHeadNorm.OWN,
    HeadNorm.BIASED: NativeHeadNorm.BIASED,
}


def attend_arguments(mixer: AttentionSpec, norm: NormSpec) -> dict[str, Any]:
    """The arguments of an `Attend` besides registers and gates."""
    return {
        "heads": {"count": mixer.num_heads, "kv": mixer.num_kv_heads, "dim": mixer.head_dim},
        "page_group": lambda at: at.page_group,
        "page_layer": lambda at: at.page_layer,
        "has_keys": int(not mixer.shares_kv),
        "keys_are_values": int(mixer.keys_are_values),
        "norms_values": int(mixer.value_norm),
        "head_norm": _HEAD_NORMS.get(mixer.head_norm, NativeHeadNorm.EACH),
        "kv_copies": mixer.kv_copies,
        "window": mixer.window or 0,
        "chunked": int(mixer.chunked),
        "blocks": int(mixer.blocks),
        "interleaved": int(mixer.rope is not None and mixer.rope.interleaved),
        "eps": norm.eps,
        "scale": score_scale(mixer),
        "softcap": mixer.softcap or 0.0,
        "k_scale": lambda at: at.kv_scales.k,
        "v_scale": lambda at: at.kv_scales.v,
        "sinks": weight_of("sinks"),
        "slopes": weight_of("slopes"),
        **({} if mixer.block_indexer is None else _blocks(mixer, mixer.block_indexer)),
        **_norms(mixer),
        **_positions(mixer),
    }


def _blocks(mixer: AttentionSpec, indexer: BlockIndexerSpec) -> dict[str, int]:
    """The arguments of attention to chosen blocks."""
    if mixer.blocks:
        raise NoNativeOp("blocks of tokens that see each other, of which an indexer chooses some")
    sizes = {"block": indexer.block, "top_k": indexer.top_k}
    return {**sizes, "behind": mixer.kv_shape.head_dim - mixer.head_dim}


def latent_arguments(mixer: AttentionSpec, latent: LatentSpec, module: int) -> dict[str, Any]:
    """The arguments of ops over latents besides registers. module: the id of kv_b_proj."""
    if mixer.blocks:
        raise NoNativeOp("blocks of tokens that see each other, over latents")
    further: dict[str, Any] = {} if mixer.indexer is None else {"behind": mixer.indexer.kept_dim}
    if mixer.top_k is not None:
        further["top_k"] = mixer.top_k
    if mixer.window is not None:
        further["window"] = mixer.window
    if mixer.sinks:
        further["sinks"] = weight_of("sinks")
    return {
        "heads": mixer.num_heads,
        "kv_rank": latent.kv_rank,
        "key": latent.key_dim,
        "rotated": latent.rotated_dim,
        "value": latent.value_dim,
        "page_group": lambda at: at.page_group,
        "interleaved": int(mixer.rope is not None and mixer.rope.interleaved),
        "module": module,
        "eps": latent.eps,
        "scale": score_scale(mixer),
        "k_norm": weight_of("k_norm"),
        "plane": lambda at: at.plane,
        "kv_up": weight_of("kv_up"),
        "bias": weight_of("kv_up_bias"),
        **further,
        **_positions(mixer),
    }


def rotation_of(rope: RopeConfig) -> dict[str, Any]:
    """The arguments of ops that rotate heads."""
    return {
        "rotary_dim": lambda at: at.tables.angles[rope][0].shape[1],
        "cos": lambda at: at.tables.angles[rope][0],
        "sin": lambda at: at.tables.angles[rope][1],
    }


def index_keys(mixer: AttentionSpec) -> dict[str, Any]:
    """Where pages keep the keys of an attention's indexer."""
    own = {"page_group": lambda at: at.page_group, "page_layer": lambda at: at.page_layer}
    shape, first = mixer.kv_shape, mixer.head_dim
    parts, dim = (1, mixer.indexer.kept_dim) if mixer.indexer is not None else (2, 0)
    if mixer.block_indexer is not None:
        dim = mixer.block_indexer.key_dim
    sizes = {"parts": parts, "heads": shape.heads, "stride": shape.head_dim, "first": first}
    return {**own, **sizes, "piece": shape.head_dim - first, "dim": dim}


def latent_shape(mixer: AttentionSpec, latent: LatentSpec) -> LatentShape:
    """How the library has kv_b_proj."""
    return LatentShape(mixer.num_heads, latent.kv_rank, latent.key_dim, latent.value_dim)


def _norms(mixer: AttentionSpec) -> dict[str, Late]:
    """Norms that have no weights get ones; where heads are normed after they are rotated, so do they, and rotated
    queries are multiplied by both weights.
    """
    if mixer.head_norm in (HeadNorm.BARE, HeadNorm.ROTATED):
        ones = torch.ones(mixer.head_dim)
        found: dict[str, Late] = {"q_norm": lambda _: ones, "k_norm": lambda _: ones}
        return found | {"query_weights": _both} if mixer.head_norm is HeadNorm.ROTATED else found
    return {"q_norm": weight_of("q_norm"), "k_norm": weight_of("k_norm")}


def _both(at: LayerBinding) -> torch.Tensor:
    return weight_of("q_norm")(at) * weight_of("k_norm")(at)


def _positions(mixer: AttentionSpec) -> dict[str, Any]:
    rope, scaling = mixer.rope, mixer.log_scaling
    found: dict[str, Any] = {}
    if rope is not None:
        found |= rotation_of(rope)
    if scaling is not None:
        found["query_factors"] = lambda at: at.tables.log_scalings[scaling]
    return found
