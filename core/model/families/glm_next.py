"""GLM-5.3-Flash, as the text part of its model of images: layers of Kimi Delta Attention, and of latent attention
without rope to the pools of tokens that an indexer chooses; hyper-connections that mix streams; limited activations.

Tests: tests/core/layers/test_pooled_indexer.py, tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.hyper import HyperConnectedLayer
from ..config_json import ConfigJson, is_number
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Experts, GatedSpec, LimitedSwiglu
from ..specs.hyper_connections import HyperConnectionSpec
from ..specs.indexer import IndexerSpec
from ..specs.layers import LayerSpec
from ..specs.recurrent import GatedDeltaSpec, RecurrentSpec
from ..specs.tensor_names import JOINED_CONVS, TensorNames
from . import glm_moe, kimi_linear, latent, reading
from .defaults import UNREAD, Defaults

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"

#: The bound of decays where no field says another one.
_LOWEST = -5.0

#: Of the norm of an indexer's keys.
_INDEX_EPS = 1e-6


def _read(fields: ConfigJson) -> ModelConfig:
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.refuse("hidden_act", f"limited activations are supported with silu alone, not with {activation}")
    eps, limit = reading.rms_norm(fields).eps, LimitedSwiglu(fields.number("swiglu_limit"))
    model = glm_moe.model(fields, _mixers(fields, eps), _NAMES, has_experts=reading.mlp_layer_types(fields, 3))
    rounds = max(1, fields.integer("hc_sinkhorn_iters", least=0))
    streams = HyperConnectionSpec(fields.integer("hc_mult"), eps, fields.number("hc_eps"), rounds=rounds, joined=False)
    layers = list[LayerSpec]()
    for layer in model.layers:
        own = layer.feed_forward
        own = replace(own, activation=limit) if isinstance(own, Experts | GatedSpec) else own
        layers.append(HyperConnectedLayer(layer.mixer, own, connections=streams))
    return replace(model, layers=tuple(layers))


def _mixers(fields: ConfigJson, eps: float) -> list[AttentionSpec | RecurrentSpec]:
    types = reading.layer_types(fields, 4, _LINEAR, _INDEXED)
    kinds = latent.indexer_kinds(fields, may_begin_shared=True)
    for index, (kind, own) in enumerate(zip(types, kinds, strict=True)):
        is_behind = index > 0 and types[index - 1] == _INDEXED and kinds[index - 1] == latent.FULL
        if kind == _INDEXED and own == latent.SHARED and not is_behind:
            why = f"layer {index} shares a choice, and transformers takes one of the layer right before it alone"
            raise fields.refuse("indexer_types", why)
    full, delta = _attention(fields, eps), _delta(fields, eps)
    of_kind = {latent.FULL: full, latent.SHARED: replace(full, indexer=None, form="shared")}
    return [delta if kind == _LINEAR else of_kind[own] for kind, own in zip(types, kinds, strict=True)]


def _attention(fields: ConfigJson, eps: float) -> AttentionSpec:
    """Latent attention with an indexer of pools."""
    if fields.integer("qk_rope_head_dim", least=0):
        raise fields.refuse("qk_rope_head_dim", "transformers rotates nothing in this family; only 0 is supported")
    latent.check_query_latents(fields)
    if not fields.boolean("index_kpool_always_select_tail"):
        raise fields.refuse("index_kpool_always_select_tail", "first tokens would see nothing; only true is supported")
    own, pool = latent.attention(fields, rotates=False), fields.integer("index_kpool")
    if (top_k := fields.integer("index_topk")) % pool:
        raise fields.refuse("index_topk", f"index_kpool is {pool}; it must be a multiple of that")
    assert own.latent is not None, "`latent.attention` has latents"
    index = IndexerSpec(fields.integer("index_n_heads"), fields.integer("index_head_dim"), None, _INDEX_EPS, pool=pool)
    return replace(own, latent=replace(own.latent, eps=eps), top_k=top_k + pool - 1, indexer=index)


def _delta(fields: ConfigJson, eps: float) -> GatedDeltaSpec:
    inner = fields.object("linear_attn_config") or fields.part("linear_attn_config", {})
    return kimi_linear.delta(kimi_linear.with_linear_fields(fields, inner), eps, _bound(fields, inner))


def _bound(fields: ConfigJson, inner: ConfigJson) -> float:
    """The bound of decays, 0 for none. inner: fields of published checkpoints, which come first."""
    own, name = (inner, "gate_lower_bound") if "gate_lower_bound" in inner.raw else (fields, "linear_lower_bound")
    found = own.raw.get(name, _LOWEST)
    if inner.raw and found is None and inner.raw.get("safe_gate", True):
        found = _LOWEST
    if found is not None and not (is_number(found) and -1e6 < found < 0):
        raise own.refuse(name, "a finite number below 0 is needed, or null for none")
    return 0.0 if found is None else float(found)


_NAMES = TensorNames(
    prefixes=("model.language_model.", "model."),
    names={
        **glm_moe.NAMES,
        **kimi_linear.DELTA_NAMES,
        **{f"{part}_hc.{end}": f"hc_{part}_{end}" for part in ("attn", "ffn") for end in ("fn", "base", "scale")},
    },
    joined=JOINED_CONVS,
    adapter_names=kimi_linear.DELTA_MODULES,
    left_out=("visual.", "model.visual."),
)
GLM_5_NEXT_TEXT = Family(
    "GLM-5.3-Flash (text)",
    (),
    _read,
    Defaults("Glm5NextTextConfig", {"num_nextn_predict_layers": 1, "linear_lower_bound": UNREAD}),
    _NAMES,
    nulls=("indexer_types", "index_topk_pattern", "linear_lower_bound", "gate_lower_bound", "num_key_value_heads"),
)
