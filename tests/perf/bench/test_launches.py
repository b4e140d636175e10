"""Launches of a layer, and the table that perf/notebook/gpu.md makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from chorus.perf.bench.estimate import RESULTS, estimate, main, mixtures, widened
from chorus.perf.bench.launches import decode_launches, prompt_launches

pytestmark = pytest.mark.triton

DOCS = Path(__file__).parents[3] / "perf" / "notebook" / "gpu.md"


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


def test_the_table_of_the_documentation_is_that_of_the_counts(decodes):
    sections, docs = json.loads(RESULTS.read_text("utf-8"))["sections"], DOCS.read_text("utf-8")
    lines = estimate(sections, decodes, 2.5, 0.85)
    assert "\n".join(lines) in docs, "run python -m chorus.perf.bench.estimate, and copy its table"
    assert all(f"  {line}\n" in docs for line in mixtures(sections, decodes, 0.78, 1.8)), "and of mixtures"


def test_quantised_weights_beyond_the_kernels_rows_move_more_bytes_than_those_of_16_bits():
    """Where they are widened in memory for the library, in every step; not with the operands swapped."""
    lines = widened(json.loads(RESULTS.read_text("utf-8"))["sections"])
    assert "\n".join(lines) in DOCS.read_text("utf-8"), "run python -m chorus.perf.bench.estimate, and copy its table"
    table = {
        name.strip("| "): list(map(float, cells)) for name, *cells in (line[:-2].split(" | ") for line in lines[2:])
    }
    dense, *narrow = table["up to 64 rows: GB"]
    weights = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)  # Llama-3.1-8B
    assert dense == pytest.approx(2 * weights / 1e9, abs=0.01)
    assert narrow[-1] == pytest.approx(weights * (4 + 32 / 128) / 8 / 1e9, abs=0.01), "a scale for 128 inputs"
    more = table["more rows, and prompts, widened: GB"]
    assert more == pytest.approx([dense, *(each + 2 * dense for each in narrow)], abs=0.02)
    assert table["more rows, and prompts, operands swapped: GB"] == [dense, *narrow]


def test_the_estimate_goes_by_its_arguments(capsys):
    assert main(["--edge-us", "0", "--share", "0.6709"]) == 0
    table = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in capsys.readouterr().out.splitlines()}
    assert table["with our product up to 64 rows"][3:] == table["base / floor"][3:]
    assert table["with persistent SGMV"][3] == table["(LoRA less adapters' floor) / base"][3]
