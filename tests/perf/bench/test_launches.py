"""Launches of a layer, by kind of step."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from chorus.perf.bench.launches import decode_launches, prompt_launches

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def decodes(tmp_path_factory):
    return decode_launches(tmp_path_factory.mktemp("launches"))


def _all(rows):
    return {(row["step"], row["adapters"], row["by"]): row["all"] for row in rows}


def test_a_decode_layer_is_eight_launches_and_lora_four_to_nine_more(decodes):
    assert _all(decodes) == {
        ("decode", "none", "library"): 9,
        ("decode", "none", "small"): 8,
        ("decode", "none", "fused"): 8,
        ("decode", "each row", "library"): 17,
        ("decode", "each row", "small"): 17,
        ("decode", "each row", "fused"): 12,
        **{("merged", "each row", by): 17 for by in ("library", "small", "fused")},
    }
    assert {row["LoRA"] for row in decodes if row["step"] == "merged"} == {8}, "one pass takes off and adds"
    assert {
        (row["by"], row["LoRA"]) for row in decodes if (row["step"], row["adapters"]) == ("decode", "each row")
    } == {
        ("library", 8),
        ("small", 8),
        ("fused", 4),
    }
    assert {row["LoRA"] for row in decodes if row["adapters"] == "none"} == {0}
    assert all(
        sum(row[kind] for kind in ("product", "attention", "LoRA", "other", "graph")) == row["all"] for row in decodes
    )


def test_a_layer_of_a_prompt_is_one_graph_and_attention_in_pieces(tmp_path):
    assert _all(prompt_launches(tmp_path)) == {
        ("prompt", "none", "library"): 9,
        ("prompt", "each row", "library"): 17,
        ("mixed", "each row", "library"): 26,
        ("prompt", "none", "pieces"): 2,
        ("prompt", "each row", "pieces"): 2,
        ("mixed", "each row", "pieces"): 3,
    }
