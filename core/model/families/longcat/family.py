"""LongCat-Flash. A checkpoint's layer is two layers here, each of latent attention and a dense part. The first also has
a mixture of experts, whose output is added after the second. Some experts return their input.

Tests: tests/core/layers/test_shortcut_experts.py, tests/core/test_families.py
"""

from __future__ import annotations

from dataclasses import replace

from .....memory.files.names.layer_numbers import LayerNumbers
from ...config_json import ConfigJson
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Experts, Routing
from ...specs.tensor_names import CORRECTION, LATENT_NORMS, LETTERS, LLAMA_NORMS, TensorNames
from .. import latent, reading
from ..defaults import TOKENS, Defaults
from .layer import LongCatExperts, LongCatLayer

#: Layers under one number.
_LAYERS = 2

#: transformers' names of fields, and those of this family.
_FIELDS = {
    "num_experts_per_tok": "moe_topk",
    "num_local_experts": "n_routed_experts",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
}


def _read(fields: ConfigJson) -> ModelConfig:
    fields = reading.renamed(fields, {own: other for other, own in _FIELDS.items()})
    _check(fields)
    numbers, hidden = _numbers(fields), fields.integer("hidden_size")
    mixer = latent.attention(fields, interleaved=True)
    assert mixer.latent is not None, "`latent.attention` gives it"
    q_factor, kv_factor = ((hidden / rank) ** 0.5 for rank in (mixer.latent.q_rank, mixer.latent.kv_rank))
    mixer = replace(mixer, latent=replace(mixer.latent, q_factor=q_factor, kv_factor=kv_factor))
    part, experts = reading.gated(fields, size="ffn_hidden_size"), _experts(fields)
    pair = [LongCatLayer(mixer, part, shortcut=experts), LongCatLayer(mixer, part)]
    left_out = (
        *(f"model.layers.{_LAYERS * number}.mlp.router.classifier." for number in range(numbers)),  # of adapters
        *(f"model.layers.{number}.mlp.experts.{each}." for number in range(numbers) for each in _identity(experts)),
    )
    tensors = replace(_TENSORS, left_out=(*_TENSORS.left_out, *left_out))
    return reading.dense(fields, pair * numbers, reading.rms_norm(fields), tensors=tensors)


def _check(fields: ConfigJson) -> None:
    """Refuse what transformers fails with for this family, or leaves out."""
    latent.check_query_latents(fields)
    fields.integer("q_lora_rank")
    key, rotated = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if (own := fields.optional("qk_head_dim")) is not None and own != key + rotated:
        raise fields.refuse("qk_head_dim", f"it is qk_nope_head_dim and qk_rope_head_dim together, {key + rotated}")
    if (own := fields.integer("head_dim")) != rotated:
        raise fields.refuse("head_dim", f"{own} elements would rotate by it; qk_rope_head_dim, {rotated}, is supported")
    if fields.boolean("router_bias", False):
        raise fields.refuse("router_bias", "transformers leaves the router's bias out; only false is supported")


def _numbers(fields: ConfigJson) -> int:
    """How many numbers layers have: transformers takes `num_hidden_layers`, where it is there, for all layers."""
    if "num_hidden_layers" not in fields.raw:
        return fields.integer("num_layers")
    if (count := fields.integer("num_hidden_layers", least=_LAYERS)) % _LAYERS:
        raise fields.refuse("num_hidden_layers", f"each of num_layers has {_LAYERS}; it must be a multiple of that")
    return count // _LAYERS


def _experts(fields: ConfigJson) -> Experts:
    routing = Routing(1, factor=fields.number("routed_scaling_factor"), corrected=True)
    identity = reading.number_of(fields, "zero_expert_num")
    count, chosen = fields.integer("n_routed_experts"), fields.integer("moe_topk")
    if chosen == 1:
        raise fields.refuse("moe_topk", "transformers' experts of this family fail with fewer than 2 for a token")
    if chosen > count + identity:
        every = f"n_routed_experts and zero_expert_num are {count + identity} together"
        raise fields.refuse("moe_topk", f"{every}; it can't be more than that")
    size, activation = (
        fields.integer("expert_ffn_hidden_size"),
        reading.gated(fields, size="ffn_hidden_size").activation,
    )
    routing = replace(routing, per_token=chosen)
    return LongCatExperts(count, size, routing, activation, identity=identity, has_fixed_router=True)


def _identity(experts: Experts) -> range:
    """Numbers of identity experts; transformers saves matrices of them, which nothing reads."""
    return range(experts.count, experts.choices)


_TENSORS = TensorNames(
    names={
        **LLAMA_NORMS,
        **LATENT_NORMS,
        "mlp.gate.weight": "mlp.router.classifier.weight",
        CORRECTION: "mlp.router.e_score_correction_bias",
    },
    numbers=LayerNumbers(
        _LAYERS,
        (
            *((f"mlp.{each}", f"mlps.{{}}.{each}") for each in LETTERS),
            *((name, f"{name}.{{}}") for name in ("self_attn", *LLAMA_NORMS.values())),
        ),
    ),
    no_parameters=("gate.weight",),
    left_out=("model.mtp",),
)

LONGCAT_FLASH = Family(
    "LongCat-Flash",
    ("LongcatFlashForCausalLM",),
    _read,
    Defaults("LongcatFlashConfig", takes=TOKENS),
    _TENSORS,
    notes=(
        f"{reading.LATENTS_NOTE}; draft layers (`mtp`) are left out; adapters' tensors of routers have no effect, "
        "as in PEFT; by ranks only if `zero_expert_num` is 0"
    ),
    nulls=("num_key_value_heads", "qk_head_dim", "zero_expert_num"),
)
