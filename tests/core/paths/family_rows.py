"""Rows of the table: a tiny model of every geometry of every family, with plain adapters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..tiny_families import EVERY, make_tiny
from .path import RANKS, TORCH_BITS
from .subject import Subject

#: States of mixtures are not compared in bfloat16.
ROUTED = {
    "bfloat16": "one changed choice of an expert changes the states of all later tokens, in transformers as here",
}

SUMS_OF_LATENTS = {
    TORCH_BITS: "over latents, PyTorch's operators sum as many terms as the batch's longest sequence has",
}

#: Mixtures of experts beside recurrent states.
HYBRID_MIXTURES = ("qwen3.5-moe", "lfm2-moe", "granite-4-h-moe", "nemotron-3", "qwen3-next", "lara-mini", "jamba")

#: Fields of families whose rows say more than their name.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"untold": ROUTED} for name in HYBRID_MIXTURES},
    "kimi-linear": {"untold": SUMS_OF_LATENTS, "changes": {"mlp_layer_types": ["dense"] * 4}},
    **{name: {"refused": {RANKS: "norms inside of attention"}} for name in ("bitnet", "bitnet-biased")},
    **{name: {"refused": {RANKS: "heads are subtracted"}} for name in ("diffllama", "diffllama-biased")},
    "longcat-flash": {"refused": {RANKS: "identity experts would be added"}},
    **{
        name: {"untold": ROUTED, "refused": {RANKS: "values are those of the token before"}}
        for name in ("zaya", "zaya-windows")
    },
    **{
        name: {"untold": ROUTED, "refused": {RANKS: "made of all streams"}}
        for name in ("qwen4-exp", "qwen4-exp-longer")
    },
    "kimi-linear-q-latents": {"untold": {**ROUTED, **SUMS_OF_LATENTS}},
    **{name: {"untold": {**ROUTED, **SUMS_OF_LATENTS}} for name in ("ling-2.6", "ling-2.6-q-latents")},
    **{name: {"untold": ROUTED} for name in ("inkling", "inkling-padded")},
    "muse-spark": {"refused": {RANKS: "each expert's output is normalised"}},
}

FAMILY_ROWS = [Subject(name, partial(make_tiny, name), family=name, **FIELDS.get(name, {})) for name in EVERY]
