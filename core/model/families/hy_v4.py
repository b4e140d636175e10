"""HY V4, and the text part of its model of images: hyper-connections around latent attention, to the tokens that an
indexer chooses, and around experts as of DeepSeek-V3.

Tests: tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

from dataclasses import replace

from ..compose.hyper import HyperConnectedLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Experts, LimitedSwiglu
from ..specs.hyper_connections import HyperConnectionSpec
from ..specs.layers import LayerSpec
from ..specs.tensor_names import TensorNames
from . import glm_moe, latent, reading, rotary
from .defaults import TOKENS, UNREAD, Defaults

#: Of M-RoPE, where `mrope_section` is missing.
_SECTIONS = (12, 10, 10)


def _read_hy(fields: ConfigJson, *, sees: bool = False) -> ModelConfig:
    """sees: see `_gated`."""
    if "num_key_value_heads" in fields.raw:  # transformers has as many as of queries, whatever number it is
        fields.integer("num_key_value_heads")
        fields = fields.without("num_key_value_heads")
    if fields.is_missing("indexer_types"):
        count = fields.integer("num_hidden_layers")
        kinds = [latent.FULL if not index or index % 4 == 1 else latent.SHARED for index in range(count)]
        fields = fields.with_values({"indexer_types": kinds})
    mixers = latent.indexed(fields, interleaved=False, kinds=latent.indexer_kinds(fields))
    eps = reading.rms_norm(fields).eps
    mixers = [_gated(each, eps, sees=sees) for each in mixers]
    floor = fields.number("hc_eps")
    streams = HyperConnectionSpec(
        fields.integer("hc_mult"), eps, floor, magnitude=fields.number("hc_magnitude"), given_floor=floor
    )
    has_experts = reading.mlp_layer_types(fields, 1)
    model = glm_moe.model(fields, mixers, _NAMES, has_experts=has_experts)
    limit, activation = LimitedSwiglu(fields.number("swiglu_limit")), reading.gated(fields).activation
    layers = list[LayerSpec]()
    for layer in model.layers:
        own = layer.feed_forward
        own = replace(own, activation=limit, shared_activation=activation) if isinstance(own, Experts) else own
        layers.append(HyperConnectedLayer(layer.mixer, own, connections=streams))
    return replace(model, layers=tuple(layers))


def _gated(mixer: AttentionSpec, eps: float, *, sees: bool) -> AttentionSpec:
    """Attention with sinks and gates, whose indexer rotates its last elements. eps: of norms. sees: in a model that
    sees images neighbours are paired to be rotated, rather than elements of both halves, and norms of latents have
    that eps, too.
    """
    assert mixer.rope is not None and mixer.latent is not None, "`indexed` rotates latents"
    rope = replace(mixer.rope, interleaved=sees)
    index = None if mixer.indexer is None else replace(mixer.indexer, rope=rope, eps=eps, rotates_last=True)
    own = replace(mixer.latent, eps=eps) if sees else mixer.latent
    return replace(mixer, rope=rope, latent=own, indexer=index, sinks=True, output_gate=OutputGate.PER_ELEMENT)


def _read_hy_text(fields: ConfigJson) -> ModelConfig:
    model = _read_hy(fields, sees=True)
    if (rope := model.attention.rope) is not None:
        rotary.check_sections(fields, rope, _SECTIONS)
    return model


def _connections() -> dict[str, tuple[str, ...]]:
    """Numbers of hyper-connections → their names: as transformers saves them, and others that it takes."""
    found: dict[str, tuple[str, ...]] = {}
    for end in ("fn", "base", "scale"):
        for part, own in (("attn", "attn"), ("ffn", "mlp")):
            layer = f"hc_{own}_layer"
            given = (f"hc_pre.{layer}.hc_{end}", f"{layer}.hc_pre.hc_{end}", f"{layer}.hc_{end}")
            found[f"{part}_hc.{end}"] = given
        head = f"hc_head_{end}"
        found[f"hc_head.hc_{end}"] = (f"hc_pre.hc_head.{head}", f"hc_head.hc_pre.{head}", f"hc_head.{head}")
    return found


_CONNECTIONS = _connections()
_NAMES = TensorNames(
    names={
        **glm_moe.NAMES,
        "self_attn.g_proj": "self_attn.gate_proj",
        "self_attn.sinks": "self_attn.learnable_sink_param",
        **{part: names[0] for part, names in _CONNECTIONS.items()},
    },
    older={
        "self_attn.g_proj": "self_attn.linear_gate",
        "mlp.gate_proj": "mlp.linear_gate",  # as transformers saves them, and the next one
        "mlp.shared_expert.gate_proj": "mlp.shared_experts.linear_gate",
        **{part: names[1:] for part, names in _CONNECTIONS.items()},
    },
    left_out=("model.mtp_layers.", "model.language_model.mtp_layers."),
)
_NOTE = (
    f"{reading.INDEXER_NOTE}; draft layers after the last are left out; the output head and "
    "the indexer's factors are computed in the model's dtype, which transformers computes in float32"
)

HY_V4 = Family(
    "Hunyuan 4 (HY V4)",
    ("HYV4ForCausalLM",),
    _read_hy,
    Defaults("HYV4Config", {"num_key_value_heads": UNREAD}, takes=("intermediate_size", *TOKENS)),
    _NAMES,
    notes=_NOTE,
    nulls=("indexer_types",),
)
HY_V4_TEXT = replace(
    HY_V4,
    title="Hunyuan 4 VL (text)",
    architectures=(),
    read=_read_hy_text,
    defaults=Defaults("HYV4VLTextConfig", {"num_key_value_heads": UNREAD}, takes=TOKENS),
)
