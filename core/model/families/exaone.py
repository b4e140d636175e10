"""EXAONE 4: norms after each part, norms of heads, and in models with windows no rope in the layers without one."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, HeadNorm, LayerSpec, Norms
from ..tensor_names import AFTER_NORMS, TensorNames
from . import reading


def _read(fields: ConfigJson) -> ModelConfig:
    heads, window = reading.heads(fields), fields.optional("sliding_window")
    rope = reading.rope(fields, heads.head_dim)
    layers = [
        LayerSpec(
            AttentionSpec(
                *heads,
                scale=heads.head_dim**-0.5,
                rope=rope if window is None or seen == reading.SLIDING else None,
                window=window if seen == reading.SLIDING else None,
                head_norm=HeadNorm.EACH,
            ),
            reading.gated(fields),
            Norms.AFTER,
        )
        for seen in reading.layer_types(fields, _pattern(fields) if window else 1)
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields))


def _pattern(fields: ConfigJson) -> int:
    """`sliding_window_pattern`: a number, or letters such as "LLLG"."""
    pattern = fields.raw.get("sliding_window_pattern")
    return len(pattern) if isinstance(pattern, str) and pattern else fields.integer("sliding_window_pattern")


EXAONE_4 = Family(
    "EXAONE 4",
    ("Exaone4ForCausalLM",),
    _read,
    {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    TensorNames(names=AFTER_NORMS),
)
