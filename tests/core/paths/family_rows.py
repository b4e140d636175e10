"""Rows of the table: a tiny model of every geometry of every family, with plain adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..tiny_families import (
    BY_TORCH,
    EXPERTS,
    FAMILIES,
    HYBRIDS,
    RENAMED,
    SHAPES,
    TORCH_HYBRIDS,
    TWO_MIXERS,
    make_tiny,
)
from .subject import Subject

#: Pages of more tokens: smaller ones have no room for a part of a recurrent state.
STATES = {"options": {"block_tokens": 16}}

ROUTED = {
    "bfloat16": "one changed choice of an expert changes the states of all later tokens, in transformers as here",
}

SUMS_OF_LATENTS = "over latents, PyTorch's operators sum as many terms as the batch's longest sequence has"

#: Families whose layers are those of others: what the native decoder lacks for them.
RENAMED_LACKS = {
    "granite-swa": "attention sinks",
    "youtu": "latent attention",
    "minicpm-3": "latent attention",
    "stablelm": "norm with a bias",
    "stablelm-before": "norm with a bias",
}

RENAMED_NATIVE = (
    "ernie-4.5", "cohere", "helium", "hyperclova-x", "cwm", "iquest-coder", "bamba", "vault-gemma", "exaone-3",
)  # fmt: skip

WITH_STATES = ("qwen3.5-moe", "lfm2-moe", "granite-4-h-moe", "nemotron-3", "kimi-linear", "kimi-linear-q-latents",
               "qwen3-next")  # fmt: skip


def families(names: Iterable[str], changed: Mapping[str, Any] | None = None, **fields: Any) -> list[Subject]:
    """Rows of families. changed: fields of some, by name."""
    return [
        Subject(name, partial(make_tiny, name), **{"family": name, **fields, **(changed or {}).get(name, {})})
        for name in names
    ]


def mixtures(names: Iterable[str]) -> list[Subject]:
    """Rows of families with experts."""
    more = {name: {**STATES, "untold": ROUTED} for name in WITH_STATES}
    more["kimi-linear-q-latents"]["untold"] = {**ROUTED, "bits": SUMS_OF_LATENTS}
    dense = {"mlp_layer_types": ["dense"] * 4}
    more["kimi-linear"] = {**STATES, "untold": {"bits": SUMS_OF_LATENTS}, "changes": dense, "bound": 5e-2}
    lacks = "mixture of experts|layer of one part"
    return families(names, more, lacks=lacks, has_experts=True, bound=8e-2)


FAMILY_ROWS = [
    *families(FAMILIES),
    *families(BY_TORCH, lacks="without a gate|LayerNorm of heads|norm of heads after they are rotated"),
    *families(SHAPES, lacks="attention of several shapes", bound=5e-2),
    *families(HYBRIDS, {"granite-4-h": {"lacks_on_ranks": "groups of heads that ranks share"}}, bound=5e-2, **STATES),
    *families(TORCH_HYBRIDS, lacks="layer of one part", bound=5e-2, **STATES),
    *families(TWO_MIXERS, lacks="recurrent mixer beside attention", bound=5e-2, **STATES),
    *families(RENAMED_NATIVE, {"bamba": {**STATES, "bound": 5e-2}}),
    *families(RENAMED_LACKS, {name: {"lacks": lacks} for name, lacks in RENAMED_LACKS.items()}),
    *mixtures(EXPERTS),
    *mixtures(name for name in RENAMED if name not in (*RENAMED_NATIVE, *RENAMED_LACKS)),
]
