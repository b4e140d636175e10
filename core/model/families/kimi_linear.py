"""Kimi Linear: layers of Kimi Delta Attention, which is Gated DeltaNet with a decay of each channel of keys, and layers
of latent attention without rope; DeepSeek-V3's experts after the first layers.

Tests: tests/core/layers/test_kimi_linear.py
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.recurrent import GatedDeltaSpec
from ..specs.tensor_names import JOINED_CONVS, LETTERS, TensorNames, gated_names
from . import glm_moe, latent, reading
from .defaults import UNREAD, Defaults

_LINEAR = "linear_attention"

#: Names of fields here, and in checkpoints.
_FIELDS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}

#: Fields of `linear_attn_config` in published checkpoints, and transformers' names.
_LINEAR_FIELDS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _read(fields: ConfigJson) -> ModelConfig:
    fields = reading.renamed(fields, _FIELDS)
    linear = fields.object("linear_attn_config") or fields.part("linear_attn_config", {})
    fields = with_linear_fields(fields, linear)
    _check(fields)
    delta_mixer = delta(fields, reading.rms_norm(fields).eps)
    mixers = {reading.FULL: latent.attention(fields, rotates=False), _LINEAR: delta_mixer}
    types = _layer_types(fields, linear)
    has_experts = reading.mlp_layer_types(fields)
    return glm_moe.model(fields, [mixers[kind] for kind in types], _NAMES, has_experts=has_experts)


def with_linear_fields(fields: ConfigJson, linear: ConfigJson) -> ConfigJson:
    """The fields, with those of `linear_attn_config` under transformers' names."""
    return fields.with_values({name: linear.integer(own) for own, name in _LINEAR_FIELDS.items() if linear.has(own)})


def _check(fields: ConfigJson) -> None:
    """Refuse what transformers leaves out for this family."""
    reading.check_silu(fields, "Kimi Delta Attention")
    if (scoring := fields.text("moe_router_activation_func", "sigmoid")) != "sigmoid":
        raise fields.refuse("moe_router_activation_func", f"{scoring} is not supported; supported: sigmoid")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.refuse("moe_layer_freq", "only experts in every layer after the dense ones are supported")
    if not fields.boolean("mla_use_nope", True):
        raise fields.refuse("mla_use_nope", "transformers rotates no queries and keys of this family")
    if fields.boolean("tie_word_embeddings"):
        raise fields.refuse("tie_word_embeddings", "transformers does not tie them for this family; set it to false")


def delta(fields: ConfigJson, eps: float, bound: float = 0.0) -> GatedDeltaSpec:
    """The mixer of layers of Kimi Delta Attention. eps, bound: see `GatedDeltaSpec`."""
    heads, size = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
    return GatedDeltaSpec(
        heads,
        heads,
        k_dim=size,
        v_dim=size,
        eps=eps,
        conv_size=fields.integer("linear_conv_kernel_dim", least=2),
        gate_rank=size,
        bound=bound,
    )


def _layer_types(fields: ConfigJson, linear: ConfigJson) -> list[str]:
    """`layer_types`; else by the numbers of layers in `linear_attn_config`, from 1; else every fourth layer after the
    first has attention.
    """
    count = fields.integer("num_hidden_layers")
    if fields.texts("layer_types"):
        return reading.layer_types(fields, 4, other=_LINEAR)
    if not (linear.has("full_attn_layers") and linear.has("kda_layers")):
        return [reading.FULL if index and index % 4 == 0 else _LINEAR for index in range(count)]
    full, delta = (set(linear.indices(name)) for name in ("full_attn_layers", "kda_layers"))
    if full & delta or full | delta != set(range(1, count + 1)):
        raise linear.refuse(
            "kda_layers", f"it and full_attn_layers must have each of the layers 1 to {count} in one of them"
        )
    return [reading.FULL if number in full else _LINEAR for number in range(1, count + 1)]


_FORGET_GATE = ("f_a_proj", "f_b_proj", "A_log", "dt_bias")

#: Names of parts of Kimi Delta Attention, and modules whose names adapters may have as published code does.
DELTA_NAMES = {
    **{f"self_attn.{each}": f"self_attn.forget_gate.{each}" for each in _FORGET_GATE},
    "self_attn.norm": "self_attn.o_norm",
}
DELTA_MODULES = {f"self_attn.{each}": f"self_attn.{each}" for each in _FORGET_GATE[:2]}

_SHARED = gated_names("mlp.shared_expert", "block_sparse_moe.shared_experts")
_NAMES = TensorNames(
    names={
        **glm_moe.NAMES,
        **DELTA_NAMES,
        **gated_names("mlp.experts.{}", "block_sparse_moe.experts.{}", LETTERS),
    },
    older={
        "mlp.gate": "block_sparse_moe.gate",
        **_SHARED,
        **gated_names("mlp", "block_sparse_moe"),  # as transformers saves dense layers
    },
    joined=JOINED_CONVS,
    adapter_names={**DELTA_MODULES, **_SHARED},  # of the modules of published checkpoints' own code
    wrapped=("self_attn.A_log",),
)
KIMI_LINEAR = Family(
    "Kimi Linear",
    ("KimiLinearForCausalLM",),
    _read,
    Defaults(
        "KimiLinearConfig",
        {
            "n_routed_experts": 256,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "num_key_value_heads": UNREAD,
        },
        takes=("intermediate_size",),
    ),
    _NAMES,
    notes=(
        f"{reading.LATENTS_NOTE}; draft layers after the last are left out; "
        "in 16 bits with `--block-tokens 32` at least"
    ),
    nulls=("num_key_value_heads", "v_head_dim"),
)
