"""The marks: the worst case counts, and a missing measurement does not meet its mark."""

from __future__ import annotations

from chorus.perf.bench.goals import goals


def bucket(size: int, **values: float | None) -> dict:
    known = {"base_over_floor": 1.1, "lora_less_floor_over_base": 1.05, "base_over_plain": 1.0}
    return {"bucket": size, **known, **values}


def cell(tokens: int, share: float, ranks: str = "16", popularity: str = "distinct") -> dict:
    return {"tokens": tokens, "share": share, "ranks": ranks, "popularity": popularity}


def test_nothing_measured():
    assert [goal.met for goal in goals({})] == [None] * 10


def test_the_worst_case_counts():
    sections = {
        "decode": {"buckets": [bucket(1, base_over_floor=1.3), bucket(64), bucket(128, base_over_floor=9.0)]},
        "sgmv": {"cells": [cell(16, 0.1), cell(32, 0.8), cell(64, 0.76), cell(64, 0.2, "8"), cell(64, 0.2, "16", "x")]},
        "ttft": {
            "rows": [
                {"rank": 16, "loading": "stream", "prompt_tokens": 128, "cold_over_warm": 1.05},
                {"rank": 16, "loading": "wait", "prompt_tokens": 128, "cold_over_warm": 1.5},
                {"rank": 64, "loading": "stream", "prompt_tokens": 128, "cold_over_warm": 1.5},
            ]
        },
        "merged": {
            "rows": [
                {"bucket": 8, "mix": "one adapter", "base_over_merged": 0.98},
                {"bucket": 64, "mix": "one adapter", "base_over_merged": 0.96},
                {"bucket": 8, "mix": "mixture", "base_over_merged": 0.95},
            ]
        },
        "http": {
            "rows": [{"popularity": "base", "over_offline": 0.9}, {"popularity": "distinct", "over_offline": 0.5}]
        },
        "sampling": {
            "steps": [
                {"bucket": 1, "temperature_over_greedy": 0.98, "top_p_over_greedy": 0.97},
                {"bucket": 64, "temperature_over_greedy": 0.99, "top_p_over_greedy": 0.94},
                {"bucket": 128, "temperature_over_greedy": 0.1, "top_p_over_greedy": 0.1},
            ]
        },
    }
    base, lora, plain, share, cold, one, mixture, http, drawn, nucleus = goals(sections)
    assert (base.value, base.met, base.where) == (1.3, False, "batch 1")
    assert (lora.value, lora.met) == (1.05, True)
    assert (plain.value, plain.met) == (1.0, True)
    assert (share.value, share.met, share.where) == (0.76, True, "batch 64")
    assert (cold.value, cold.met, cold.where) == (1.05, True, "prompt of 128")
    assert (one.value, one.met, one.where) == (0.96, False, "batch 64")
    assert (mixture.value, mixture.met) == (0.95, True)
    assert (http.value, http.met, http.where) == (0.9, False, "base")
    assert (drawn.value, drawn.met, drawn.where) == (0.98, True, "batch 1")
    assert (nucleus.value, nucleus.met, nucleus.where) == (0.94, False, "batch 64")


def test_a_value_that_is_missing_is_not_met():
    (_, _, plain, *_) = goals({"decode": {"buckets": [bucket(1, base_over_plain=None)]}})
    assert plain.met is None
