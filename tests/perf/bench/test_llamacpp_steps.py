"""The race with llama.cpp: its files, its output, its programs played by a script."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.perf.bench.llamacpp_steps import ARCHITECTURES, CASES, PLAIN, main, parse_rates, write_gguf
from chorus.perf.bench.models.sizes import SIZES

SAID = """
llama_context: n_ctx = 4096
{"pp": 256, "tg": 64, "pl": 1, "speed_pp": 300.5, "speed_tg": 52.25}
{"pp": 256, "tg": 64, "pl": 8, "speed_pp": 310.0, "speed_tg": 94.0}
"""

PROGRAM = """#!/bin/sh
case "$0" in
*quantize) cp "$2" "$3" ;;
*) test -f "$2" && for count in 1 8; do echo '{"pl": '$count', "speed_pp": 1e9, "speed_tg": 1e9}'; done ;;
esac
"""


def test_rates_are_read_from_the_programs_lines():
    assert parse_rates(SAID) == {
        "decode, 1 row": 52.25,
        "decode, 8 rows": 94.0,
        "prompt of 1": 300.5,
        "prompts of 8": 310.0,
    }


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_written_file_has_all_weights_of_the_engines_model(family, tmp_path):
    pytest.importorskip("gguf")
    size = replace(SIZES["tiny"], family=family)
    write_gguf(size, tmp_path / "model.gguf")
    size.write_config(tmp_path, "bfloat16")
    config = EngineConfig(model=tmp_path, device="cpu", max_model_len=64, memory_bytes=4 << 20)
    Engine.from_config(config).close()  # it refuses a file that lacks a tensor, or has one of another shape


def test_a_race_has_a_row_per_weights_and_case(tmp_path, capsys):
    """llama.cpp's programs are a script that tells a rate beyond any engine's."""
    pytest.importorskip("gguf")
    programs = tmp_path / "build" / "bin"
    programs.mkdir(parents=True)
    for name in ("llama-quantize", "llama-batched-bench"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    short = ["--prompt", "8", "--steps", "2", "--rounds", "1", "--threads", "1", "--quantization", PLAIN, "int8"]
    assert main([str(tmp_path), "--model-size", "tiny", *short]) == 1, "the bars are missed"
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["quantization"], row["case"]) for row in said["rows"]] == [
        (weights, case) for weights in (PLAIN, "int8") for case in CASES
    ]
    assert all(row["ours"] > 0 and 0 < row["ratio"] < 1 for row in said["rows"]) and not said["met"]
