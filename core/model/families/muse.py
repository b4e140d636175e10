"""Muse Glimmer's text: norms around each part, gates of attention's output, and layers with a window and a rope between
others that have neither.

Queries and keys are normalised without weights, and so are embeddings. The norms of what parts add have an eps of their
own, and the last norm's weights are stored as they are, where those of layers are stored less one.

Tests: tests/core/test_text_parts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm, OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family, text_shape
from ..specs.layers import LayerSpec
from ..specs.norms import Norms, NormSpec
from ..specs.tensor_names import AROUND_NORMS, TEXT_AND_IMAGES, TensorNames
from . import reading, rotary


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("tie_word_embeddings"):
        why = "the embeddings are normalised, and the output projection is not; only false is supported"
        raise fields.refuse("tie_word_embeddings", why)
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    rope = rotary.rope(fields, heads.head_dim)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5 * fields.number("qk_scale_factor"),
        rope=None,
        head_norm=HeadNorm.BARE,
        qkv_bias=bias,
        o_bias=bias,
        output_gate=OutputGate.APART,
    )
    count = fields.integer("num_hidden_layers")
    every_fourth = [(count - 1 - at) % 4 == 0 for at in range(count)]
    types = (fields.texts("layer_types") and reading.layer_types(fields, 1)) or [
        reading.FULL if each else reading.SLIDING for each in every_fourth
    ]
    rotates = [not each for each in every_fourth]
    if not fields.is_missing("layer_rope_theta"):
        rotates = [theta != 0 for theta in fields.numbers("layer_rope_theta")]
        if len(rotates) != count:
            raise fields.refuse("layer_rope_theta", f"{len(rotates)} bases for num_hidden_layers, {count}")
    feed_forward = reading.gated(fields, "hidden_activation")
    layers = [
        LayerSpec(
            replace(attention, rope=rope if turns else None, window=window),
            feed_forward,
            Norms.AROUND,
            out_eps=fields.number("post_norm_eps"),
        )
        for turns, window in zip(rotates, reading.windows_of(fields, types), strict=True)
    ]
    eps = fields.number("rms_norm_eps")
    return reading.dense(
        fields,
        layers,
        NormSpec(eps, one_plus=True, wide=True),
        last_norm=NormSpec(eps, wide=True),
        embedding_rows_eps=eps,
        logits_scale=fields.number("output_multiplier"),
        logits_softcap=fields.number("final_logit_softcapping"),
    )


GLIMMER = Family(
    "Muse Glimmer (text)",
    ("MuseGlimmerForConditionalGeneration",),
    _read,
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 2048,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
        "bos_token_id": 200000,
        "eos_token_id": 200001,
    },
    TensorNames(
        prefixes=TEXT_AND_IMAGES.prefixes,
        names={**AROUND_NORMS, "self_attn.g_proj": "self_attn.gate_proj"},
        left_out=tuple(
            f"{outer}{part}."
            for outer in ("", "model.")
            for part in ("vision_tower", "vision_adapter", "vision_projection")
        ),
    ),
    notes="text only; adapters with rows of embeddings of their own are refused, as these are normalised",
    shape=text_shape(202048, 6656, 19968, 52, 32),
)
