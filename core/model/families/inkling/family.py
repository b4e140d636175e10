"""Inkling's text: attention that adds learned numbers of queries and distances to scores, in place of a rope; short
convolutions of keys, values and of what layers' parts add; experts beside sinks that every token goes to.

Embeddings are normalised, and dense parts have a learned factor. Layers with a window may have other heads.

Tests: tests/core/layers/test_relative_attention.py, tests/core/layers/test_stream_convs.py,
tests/core/layers/test_sink_experts.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec, HeadNorm, RelativeSpec
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Experts, GatedSpec
from ...specs.tensor_names import CORRECTION, LLAMA_NORMS, TensorNames
from .. import reading
from ..defaults import TOKENS, Defaults
from .experts import SinkExperts
from .layer import InklingLayer
from .stream_convs import StreamConvSpec

if TYPE_CHECKING:
    import torch

#: Types of layers without a window, and with one.
_WHOLE, _SLIDING = "hybrid", "hybrid_sliding"

#: Names of fields here, and those which published checkpoints have for them.
_FIELDS = {
    "sliding_window": "sliding_window_size",
    "n_routed_experts": "num_local_experts",
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
    "logits_mup_width_multiplier": "embedding_multiplier",
}

#: What fields of heads begin with, by the type of layers.
_OF_HEADS = {_WHOLE: "", _SLIDING: "swa_"}

_GATED, _OUT = ("gate_proj", "up_proj"), ("down_proj",)


@dataclass(frozen=True, slots=True)
class FlooredLogScaling:
    """A query of position p is multiplied by `1 + alpha · log(max((p + 1) / floor, 1))`."""

    is_rounded: ClassVar[bool] = False

    alpha: float
    floor: int

    def factors(self, count: int) -> torch.Tensor:
        """See `LogScaling.factors`."""
        import torch

        return 1 + self.alpha * torch.log((torch.arange(1, count + 1).float() / self.floor).clamp(min=1.0))


def _read(fields: ConfigJson) -> ModelConfig:
    fields = _with_widths(reading.renamed(fields, _FIELDS))
    vocab, unpadded = fields.integer("vocab_size"), fields.optional("unpadded_vocab_size")
    beyond = max(0, vocab - (unpadded or vocab))
    layers = [
        InklingLayer(mixer, feed_forward, convolutions=convs)
        for (mixer, convs), feed_forward in zip(_mixers(fields), _feed_forwards(fields), strict=True)
    ]
    norm = reading.rms_norm(fields)
    return reading.dense(
        fields.with_values({"vocab_size": vocab - beyond}),
        layers,
        norm,
        tensors=_names(fields),
        tie_word_embeddings=False,  # whatever the field says, transformers ties nothing
        embedding_rows_eps=norm.eps,
        embedding_rows_scaled=True,
        further_embeddings=beyond,
        further_logits=beyond,
        logits_scale=1 / fields.number("logits_mup_width_multiplier"),
    )


def _with_widths(fields: ConfigJson) -> ConfigJson:
    """Where `dense_intermediate_size` is there, `intermediate_size` is the width of experts."""
    if (dense := fields.optional("dense_intermediate_size")) is None:
        return fields
    width = fields.integer("intermediate_size")
    return fields.with_values({"moe_intermediate_size": width, "intermediate_size": dense})


def _mixers(fields: ConfigJson) -> Iterator[tuple[AttentionSpec, StreamConvSpec]]:
    """Attention and convolutions of each layer."""
    types = _types_of(fields)
    heads = {kind: _heads_of(fields, _OF_HEADS[kind]) for kind in _OF_HEADS if kind in types}
    forms = [(each.num_kv_heads, each.head_dim) for each in heads.values()]
    floor, taps = fields.optional("log_scaling_n_floor"), fields.integer("conv_kernel_size", least=2)
    scaling = None if floor is None else FlooredLogScaling(fields.number("log_scaling_alpha"), floor)
    mixers: dict[str, AttentionSpec] = {}
    for kind, each in heads.items():
        window = fields.integer("sliding_window") if kind == _SLIDING else None
        mixers[kind] = AttentionSpec(
            *each,
            scale=1 / each.head_dim,
            rope=None,
            window=window,
            head_norm=HeadNorm.EACH,
            log_scaling=None if window else scaling,
            relative=RelativeSpec(fields.integer("d_rel"), window or fields.integer("rel_extent")),
            form="sliding" if window and each != heads.get(_WHOLE, each) else "",
        )
    for kind in types:
        at = [*heads].index(kind)
        yield mixers[kind], StreamConvSpec(fields.integer("hidden_size"), tuple(forms), at, taps)


def _heads_of(fields: ConfigJson, begin: str) -> reading.Heads:
    """The heads of a type of layers. begin: of their fields' names."""
    count, kv_count = (fields.integer(f"{begin}{name}") for name in ("num_attention_heads", "num_key_value_heads"))
    found = reading.Heads(count, kv_count, fields.integer(f"{begin}head_dim", least=2))
    if found.num_heads % found.num_kv_heads:
        why = f"{begin}num_attention_heads, {found.num_heads}, must be a multiple of it"
        raise fields.refuse(f"{begin}num_key_value_heads", why)
    return found


def _types_of(fields: ConfigJson) -> list[str]:
    """The type of each layer: by `layer_types`, or by numbers of layers with a window; else all but every sixth."""
    count = fields.integer("num_hidden_layers")
    if not fields.is_missing("layer_types"):
        return reading.checked_types(fields, fields.texts("layer_types"), (_WHOLE, _SLIDING))
    local = {at for at in range(count) if (at + 1) % 6}
    if not fields.is_missing("local_layer_ids"):
        local = {*fields.indices("local_layer_ids")}
    return [_SLIDING if at in local else _WHOLE for at in range(count)]


def _feed_forwards(fields: ConfigJson) -> Iterator[Experts | GatedSpec]:
    """The feed-forward part of each layer."""
    routing, sinks = reading.sigmoid_routing(fields, "route_scale"), fields.integer("n_shared_experts")
    experts = reading.experts(fields, routing, kind=SinkExperts, sinks=sinks, has_fixed_router=True)
    dense = reading.gated(fields)
    for it in reading.mlp_layer_types(fields, reading.number_of(fields, "dense_mlp_idx")):
        yield experts if it else dense


TOWERS = tuple(
    f"{outer}{part}." for outer in ("", "model.") for part in ("vision_tower", "audio_tower", "visual", "audio", "mtp")
)
_NAMES = TensorNames(
    names=LLAMA_NORMS,
    embedding_norm="embed_tokens.embed_norm",
    fused={"mlp.gate": ("mlp.gate", "mlp.sink_gate")},
    stacked={f"mlp.shared_experts.{each}": (f"mlp.sink_experts.{{}}.{each}",) for each in (*_GATED, *_OUT)},
    left_out=TOWERS,
)
#: Names of published checkpoints in all of the family.
_PUBLISHED_NAMES = {
    "attention_norm": "attn_norm",
    "mlp_norm": "mlp_norm",
    **{f"self_attn.{each}_proj": f"attn.w{each}_du" for each in "qr"},
    **{f"self_attn.{each}_proj": f"attn.w{each}_dv" for each in "kv"},
    "self_attn.o_proj": "attn.wo_ud",
    **{f"self_attn.{each}": f"attn.{each}" for each in ("q_norm", "k_norm")},
    "self_attn.rel_logits_proj.proj": "attn.rel_logits_proj.proj",
    **{f"self_attn.{each}_sconv.conv1d": f"attn.{each}_sconv" for each in "kv"},
    **{f"{each}_sconv.conv1d": f"{each}_sconv" for each in ("attn", "mlp")},
}
_PUBLISHED_EXPERTS = {"mlp.experts.w13_weight": _GATED, "mlp.experts.w2_weight": _OUT}
_PUBLISHED = TensorNames(
    prefixes=("model.llm.",),
    heads=("model.llm.unembed.weight",),
    embeddings="embed",
    embedding_norm="embed_norm",
    names={**_PUBLISHED_NAMES, CORRECTION: "mlp.gate.bias", "mlp.down_proj": "mlp.w2_md"},
    fused={"mlp.gate": ("mlp.gate", "mlp.sink_gate"), "mlp.w13_dn": ("mlp.gate_proj", "mlp.up_proj")},
    by_unit=("mlp.w13_dn",),
    stacked_experts=_PUBLISHED_EXPERTS,
    stacked={
        f"mlp.shared_experts.shared_{name}": tuple(f"mlp.sink_experts.{{}}.{each}" for each in own)
        for name, own in (("w13_weight", _GATED), ("w2_weight", _OUT))
    },
    alternates=True,
    left_out=TOWERS,
)


def _names(fields: ConfigJson) -> TensorNames:
    """Rows of gate and up of published dense parts alternate."""
    published = replace(_PUBLISHED, units={"mlp.w13_dn": fields.integer("intermediate_size")})
    return replace(_NAMES, published=(published,))


INKLING = Family(
    "Inkling",
    ("InklingForCausalLM",),
    _read,
    Defaults("InklingTextConfig", {"sliding_window": 512}, takes=("intermediate_size", *TOKENS)),
    _NAMES,
    notes=(
        "draft layers are left out; adapters on experts that every token goes to, and those with rows of embeddings of "
        f"their own, are refused; {reading.ON_OPERATORS}"
    ),
    nulls=("unpadded_vocab_size", "log_scaling_n_floor", "local_layer_ids", "dense_intermediate_size"),
)
