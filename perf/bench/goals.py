"""The goals that GPU results are compared with: chosen for Llama-3.1-8B in bf16 on an H200, the same for all GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..report.table import Goal

LARGEST_BATCH = 64
SGMV_LEAST_BATCH = 32


def goals(sections: Mapping[str, Any]) -> list[Goal]:
    """All goals. sections: values of the finished sections; the worst row of a missing section is unknown."""
    decode = sections.get("decode", {})
    steps = [row for row in decode.get("buckets", ()) if row["bucket"] <= LARGEST_BATCH]
    shares = [
        row
        for row in sections.get("sgmv", {}).get("cells", ())
        if row["tokens"] >= SGMV_LEAST_BATCH and row["ranks"] == "16" and row["popularity"] == "distinct"
    ]
    merged = {
        mix: [row for row in sections.get("merged", {}).get("rows", ()) if row["mix"] == mix]
        for mix in ("one adapter", "mixture")
    }
    drawn = [row for row in sections.get("sampling", {}).get("steps", ()) if row["bucket"] <= LARGEST_BATCH]
    cold = [row for row in sections.get("ttft", {}).get("rows", ()) if row["rank"] == 16 and row["loading"] == "stream"]
    http = [row for row in sections.get("http", {}).get("rows", ()) if row["popularity"] == "base"]
    return [
        _worst("decode step, base / byte floor", steps, "base_over_floor", 1.15),
        _worst(
            "(decode step, distinct r16, less adapters' byte floor) / base", steps, "lora_less_floor_over_base", 1.05
        ),
        _worst("base step / that of an engine without LoRA", steps, "base_over_plain", 1.01),
        _worst("SGMV share of bandwidth, distinct r16", shares, "share", 0.75, at_most=False),
        _worst("cold TTFT / warm TTFT, r16", cold, "cold_over_warm", 1.10),
        _worst("tokens/s of one merged adapter / base", merged["one adapter"], "base_over_merged", 0.97, at_most=False),
        _worst("tokens/s of a merged mixture / base", merged["mixture"], "base_over_merged", 0.93, at_most=False),
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
