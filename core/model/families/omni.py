"""The text part of the thinkers of Qwen2.5-Omni and Qwen3-Omni, alone or in the whole model with its talker.

Tests: tests/core/test_text_parts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..family import Family, text_shape
from ..tensor_names import TensorNames
from . import qwen, qwen3_moe, reading

_PREFIXES = ("model.language_model.", "model.")
_LEFT_OUT = ("visual.", "audio_tower.")
_THINKER = TensorNames(
    prefixes=_PREFIXES,
    left_out=tuple(f"{outer}{part}" for outer in ("", "model.") for part in _LEFT_OUT),
)
_WHOLE = TensorNames(
    prefixes=tuple(f"thinker.{each}" for each in _PREFIXES),
    heads=("thinker.lm_head.weight",),
    left_out=(*(f"thinker.{each}" for each in _THINKER.left_out), "talker.", "token2wav.", "code2wav."),
)


def _of_whole(thinker: Family, *architectures: str) -> Family:
    return replace(
        thinker,
        title=f"{thinker.title}, with its talker",
        architectures=architectures,
        tensors=_WHOLE,
        text_part=f"thinker_config.{thinker.text_part}",
    )


QWEN2_5_OMNI = Family(
    "Qwen2.5-Omni's thinker (text)",
    ("Qwen2_5OmniThinkerForConditionalGeneration",),
    qwen.reader(None, sections=(16, 24, 24)),
    {
        **qwen.QWEN2.defaults,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
    },
    _THINKER,
    notes="text only",
    nulls=("num_key_value_heads",),
    shape=text_shape(152064, 3584, 18944, 28, 28),
)
QWEN3_OMNI = Family(
    "Qwen3-Omni's thinker (text)",
    ("Qwen3OmniMoeThinkerForConditionalGeneration",),
    qwen3_moe.QWEN3_MOE.read,
    {**qwen3_moe.QWEN3_MOE.defaults, "num_key_value_heads": 4, "rope_theta": 1000000.0, "norm_topk_prob": True},
    _THINKER,
    notes=f"text only; {reading.EXPERTS_NOTE}",
    shape=text_shape(3584, 2048, 18944, 28, 28),
)
QWEN2_5_OMNI_WHOLE = _of_whole(QWEN2_5_OMNI, "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel")
QWEN3_OMNI_WHOLE = _of_whole(QWEN3_OMNI, "Qwen3OmniMoeForConditionalGeneration")
