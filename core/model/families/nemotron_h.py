"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is one part, with one norm before it: Mamba 2, attention
without a rope, a feed-forward part without a gate, or a mixture of such experts.

Tests: tests/core/layers/test_hybrids.py, tests/core/test_experts.py
"""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Experts, LatentExperts, UngatedActivation, UngatedSpec
from ..specs.norms import NormSpec
from ..specs.recurrent import MambaSpec
from ..specs.tensor_names import CORRECTION, TensorNames
from . import reading, rotary
from .defaults import Defaults

_MAMBA, _MLP, _EXPERTS = "linear_attention", "mlp", "moe"

#: Older names of types, and the letters of `hybrid_override_pattern`.
_TYPES = {
    "mamba": _MAMBA,
    "attention": reading.FULL,
    **dict(zip("M*-E", (_MAMBA, reading.FULL, _MLP, _EXPERTS), strict=True)),
    **{each: each for each in (_MAMBA, reading.FULL, _MLP, _EXPERTS)},
}


def _read(fields: ConfigJson) -> ModelConfig:
    types = _layer_types(fields)
    norm = NormSpec(fields.number("layer_norm_epsilon"), wide=True)
    if fields.boolean("attention_bias"):
        raise fields.refuse("attention_bias", "transformers leaves it out for this family; only false is supported")
    layers = {reading.FULL: DecoderLayer(rotary.attention(fields, rope=None, bias=False), None)}
    if _MAMBA in types:
        layers[_MAMBA] = DecoderLayer(_mamba(fields, norm.eps), None)
    if _MLP in types:
        bias = fields.boolean("mlp_bias")
        layers[_MLP] = DecoderLayer(None, UngatedSpec(fields.integer("intermediate_size"), _activation(fields), bias))
    if _EXPERTS in types:
        layers[_EXPERTS] = DecoderLayer(None, _experts(fields))
    # transformers ties no weights of this family, whatever the field says
    return reading.dense(fields, [layers[kind] for kind in types], norm, tie_word_embeddings=False)


def _layer_types(fields: ConfigJson) -> list[str]:
    """`num_hidden_layers` is ignored, as in transformers."""
    for name in (reading.one_of(fields, "layers_block_type", "layer_types"), "hybrid_override_pattern"):
        if not fields.has(name):
            continue
        types = list(fields.text(name)) if name == "hybrid_override_pattern" else fields.texts(name)
        if unknown := sorted(set(types) - _TYPES.keys()):
            raise fields.refuse(name, f"{unknown[0]} is not supported; supported: {', '.join(_TYPES)}")
        return [_TYPES[kind] for kind in types]
    return [_MAMBA, _EXPERTS, reading.FULL, _MLP]


def _mamba(fields: ConfigJson, eps: float) -> MambaSpec:
    """transformers limits time steps by `time_step_min`, whatever `time_step_limit` is."""
    heads, groups = fields.integer("mamba_num_heads"), fields.integer(_either(fields, "mamba_n_groups", "n_groups"))
    if heads % groups:
        raise fields.refuse("n_groups", f"mamba_num_heads, {heads}, must be a multiple of it")
    if fields.text("mamba_hidden_act", "silu") != "silu":
        raise fields.refuse("mamba_hidden_act", "Mamba layers are supported with silu alone")
    return MambaSpec(
        heads,
        fields.integer("mamba_head_dim"),
        groups,
        fields.integer("ssm_state_size"),
        eps=eps,
        conv_size=fields.integer(_either(fields, "mamba_d_conv", "conv_kernel"), least=2),
        conv_bias=fields.boolean(_either(fields, "mamba_conv_bias", "use_conv_bias")),
        bias=fields.boolean("use_bias"),
        dt_min=fields.number(_either(fields, "mamba_dt_min", "time_step_min")),
    )


def _either(fields: ConfigJson, older: str, name: str) -> str:
    """The older name of a field, which transformers prefers, where the configuration has it."""
    return older if older in fields.raw else name


def _activation(fields: ConfigJson) -> UngatedActivation:
    name, known = fields.text("mlp_hidden_act"), (UngatedActivation.RELU_SQUARED, UngatedActivation.GELU_TANH)
    if name not in known:
        raise fields.refuse("mlp_hidden_act", f"not supported; supported: {', '.join(known)}")
    return UngatedActivation(name)


def _experts(fields: ConfigJson) -> Experts:
    if fields.boolean("mlp_bias"):
        raise fields.refuse("mlp_bias", "experts are supported without biases; supported: false")
    latent = LatentExperts(fields.integer("moe_latent_size")) if fields.has("moe_latent_size") else None
    return reading.experts(
        fields,
        reading.routing_in_groups(fields),
        shared=fields.integer("moe_shared_expert_intermediate_size"),
        activation=_activation(fields),
        latent=latent,
    )


_NAMES = {
    "attention_norm": "norm",
    "mlp_norm": "norm",
    **{f"self_attn.{each}_proj": f"mixer.{each}_proj" for each in "qkvo"},
    "mamba": "mixer",
    **{f"mamba.{each}": f"mixer.{each}" for each in ("in_proj", "out_proj", "conv1d", "norm")},
    **{f"mlp.{each}_proj": f"mixer.{each}_proj" for each in ("up", "down")},
    "mlp.gate": "mixer.gate",
    CORRECTION: "mixer.gate.e_score_correction_bias",
    "mlp.pre_expert_proj": "mixer.fc1_latent_proj",
    "mlp.post_expert_proj": "mixer.fc2_latent_proj",
    **{f"mlp.shared_expert.{each}_proj": f"mixer.shared_experts.{each}_proj" for each in ("up", "down")},
    **{f"mlp.experts.{{}}.{each}_proj": f"mixer.experts.{{}}.{each}_proj" for each in ("up", "down")},
}
NEMOTRON_H = Family(
    "Nemotron-H, Nemotron Nano 2 and 3, Nemotron 3 Super and Ultra",
    ("NemotronHForCausalLM",),
    _read,
    Defaults("NemotronHConfig", takes=("intermediate_size",)),
    TensorNames(
        prefixes=("model.", "backbone.", ""),
        norm="norm_f",
        embeddings="embeddings",
        names=_NAMES,
        stacked_experts={"mixer.experts.up_proj": ("up_proj",), "mixer.experts.down_proj": ("down_proj",)},
        left_out=("mtp.",),
    ),
    notes="drafts (`mtp`) are left out",
)
