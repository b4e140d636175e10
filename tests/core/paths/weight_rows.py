"""Rows of the table: forms in which weights, and keys and values, are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..tiny_families import EXPERTS, make_tiny
from ..tiny_mixtures import ADAPTERS, make_mixture
from .adapter_rows import DENSE, of_family
from .float8_caches import Float8Cache
from .quantised import Quantised
from .subject import Subject

#: Full attention, windows, soft caps, norms of heads, sinks, linear attention and experts.
FLOAT8_KV = ("llama3", "qwen3", "qwen2-window", "gemma-2", "gemma-3", "olmo-3", "gpt-oss", "mixtral", "qwen3.5")

#: Dense, with norms around, with windows and with states; a plain mixture, one with biases whose experts are stacked,
#: and one with a shared expert.
QUANTISED = [
    *((family, form) for family in ("llama-biased", "gemma-3", "qwen3.5") for form in ("int8", "int4", "fp8")),
    *((family, form) for family in ("qwen3-moe", "gpt-oss", "glm-4-moe") for form in ("int8", "int4")),
    ("gpt-oss", "mxfp4"),
]


def float8_kv(family: str) -> Subject:
    def make() -> Any:
        return Float8Cache(make_tiny(family))

    return replace(_with(of_family(f"{family}: FP8 KV", family, make), kv_cache_dtype="fp8"), most_tokens=8)


def quantised(family: str, form: str) -> Subject:
    """With adapters on all parts, and with one on attention, which may be merged."""
    recipes = {**ADAPTERS, **DENSE}
    mixed = family in EXPERTS
    base = partial(make_mixture, family, recipes) if mixed else partial(make_tiny, family)
    adapters = ((None, *recipes), next(iter(DENSE))) if mixed else ()
    row = of_family(f"{family}: {form}", family, lambda: Quantised(base(), form), *adapters)
    return row if form == "mxfp4" else _with(row, quantization=form)


def _with(row: Subject, **options: Any) -> Subject:
    return replace(row, options={**row.options, **options})


WEIGHT_ROWS = [*map(float8_kv, FLOAT8_KV), *(quantised(*each) for each in QUANTISED)]
