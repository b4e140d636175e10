"""The goals that GPU results are compared with: chosen for Llama-3.1-8B in bf16 on an H200, the same for all GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..report.table import Goal

LARGEST_BATCH = 64
SGMV_LEAST_BATCH = 32


def goals(sections: Mapping[str, Any]) -> list[Goal]:
    """All goals. sections: values of the finished sections; the worst row of a missing section is unknown."""

    def rows(section: str, name: str = "rows", **wanted: Any) -> list[Mapping[str, Any]]:
        found = sections.get(section, {}).get(name, ())
        return [row for row in found if all(row[key] == value for key, value in wanted.items())]

    steps = [row for row in rows("decode", "buckets") if row["bucket"] <= LARGEST_BATCH]
    drawn = [row for row in rows("sampling", "steps") if row["bucket"] <= LARGEST_BATCH]
    shares = [
        row for row in rows("sgmv", "cells", ranks="16", popularity="distinct") if row["tokens"] >= SGMV_LEAST_BATCH
    ]
    cold, http = rows("ttft", rank=16, loading="stream"), rows("http", popularity="base")
    one, mixture = rows("merged", mix="one adapter"), rows("merged", mix="mixture")
    return [
        _worst("decode step, base / byte floor", steps, "base_over_floor", 1.15),
        _worst(
            "(decode step, distinct r16, less adapters' byte floor) / base", steps, "lora_less_floor_over_base", 1.05
        ),
        _worst("base step / that of an engine without LoRA", steps, "base_over_plain", 1.01),
        _worst("SGMV share of bandwidth, distinct r16", shares, "share", 0.75, at_most=False),
        _worst("cold TTFT / warm TTFT, r16", cold, "cold_over_warm", 1.10),
        _worst("tokens/s of one merged adapter / base", one, "base_over_merged", 0.97, at_most=False),
        _worst("tokens/s of a merged mixture / base", mixture, "base_over_merged", 0.93, at_most=False),
        _worst("tokens/s over HTTP / without it", http, "over_offline", 0.95, at_most=False),
        _worst("tokens/s at temperature 1 / greedy", drawn, "temperature_over_greedy", 0.97, at_most=False),
        _worst("tokens/s at top_p 0.9 / greedy", drawn, "top_p_over_greedy", 0.95, at_most=False),
    ]


def _worst(name: str, rows: Iterable[Mapping[str, Any]], key: str, mark: float, *, at_most: bool = True) -> Goal:
    known = [row for row in rows if row.get(key) is not None]
    if not known:
        return Goal(name, None, mark, at_most)
    row = (max if at_most else min)(known, key=lambda row: row[key])
    return Goal(name, row[key], mark, at_most, _where(row))


def _where(row: Mapping[str, Any]) -> str:
    cases = {"bucket": "batch {}", "tokens": "batch {}", "popularity": "{}", "prompt_tokens": "prompt of {}"}
    return next(text.format(row[key]) for key, text in cases.items() if key in row)
