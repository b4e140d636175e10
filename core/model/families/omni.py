"""The text part of the thinkers of Qwen2.5-Omni and Qwen3-Omni, alone or in the whole model with its talker.

Tests: tests/core/test_text_parts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..specs.family import Family
from ..specs.tensor_names import TensorNames
from . import qwen, qwen3_moe
from .defaults import UNREAD, Defaults

_OUTER = ("", "thinker.")
_TOWERS = ("visual.", "audio_tower.", "model.visual.", "model.audio_tower.")
_TENSORS = TensorNames(
    prefixes=tuple(f"{outer}{each}" for outer in _OUTER for each in ("model.language_model.", "model.")),
    heads=tuple(f"{outer}lm_head.weight" for outer in _OUTER),
    left_out=(
        *(f"{outer}{tower}" for outer in _OUTER for tower in _TOWERS),
        "talker.",
        "token2wav.",
        "code2wav.",
    ),
    head_part="thinker",
)
"""Names of tensors with a talker beside the thinker, and without one: an adapter may have been trained on either."""


def _of_whole(thinker: Family, *architectures: str) -> Family:
    return replace(
        thinker,
        title=f"{thinker.title}, with its talker",
        architectures=architectures,
        text_part=f"thinker_config.{thinker.text_part}",
        head_part="thinker_config",
    )


QWEN2_5_OMNI = Family(
    "Qwen2.5-Omni's thinker (text)",
    ("Qwen2_5OmniThinkerForConditionalGeneration",),
    qwen.reader(None, axes=qwen.AXES),
    Defaults("Qwen2_5OmniTextConfig", {"sliding_window": 4096, "tie_word_embeddings": UNREAD}),
    _TENSORS,
    notes="text only",
    nulls=("num_key_value_heads",),
)
QWEN3_OMNI = Family(
    "Qwen3-Omni's thinker (text)",
    ("Qwen3OmniMoeThinkerForConditionalGeneration",),
    qwen3_moe.QWEN3_MOE.read,
    Defaults("Qwen3OmniMoeTextConfig", {"sliding_window": 4096}, takes=("intermediate_size",)),
    _TENSORS,
    notes="text only",
)
QWEN2_5_OMNI_WHOLE = _of_whole(QWEN2_5_OMNI, "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel")
QWEN3_OMNI_WHOLE = _of_whole(QWEN3_OMNI, "Qwen3OmniMoeForConditionalGeneration")
