"""The price of company on servers, of a tiny model for a moment."""

from __future__ import annotations

import json
import sys

import pytest

from chorus.perf.bench.company_beside import main

TINY = ["--model-size", "tiny", "--sequences", "1", "3", "--output-tokens", "4", "--rounds", "1", "--threads", "1"]

_AS_VLLM = """#!/bin/sh
# vllm serve MODEL --host HOST --port PORT … --lora-modules NAME=PATH …
model="$2" host="$4" port="$6" room="${{10}}"
for last; do :; done
exec {python} -m chorus.server serve --model "$model" --host "$host" --port "$port" --memory-bytes 64MiB \\
  --max-model-len "$room" --speculation off --adapters "$(dirname "${{last#*=}}")"
"""


def test_each_server_has_a_ratio_for_each_number_of_sequences(capsys, tmp_path):
    peer = tmp_path / "env" / "bin" / "vllm"
    peer.parent.mkdir(parents=True)
    peer.write_text(_AS_VLLM.format(python=sys.executable))
    peer.chmod(0o755)
    assert main([*TINY, "--beside", f"vllm={peer}"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    wanted = [(number, server) for number in (1, 3) for server in ("chorus", "vllm")]
    assert [(row["sequences"], row["server"]) for row in rows] == wanted
    assert all(row["base"] > 0 and row["mixed"] > 0 and row["ratio"] > 0 for row in rows)


@pytest.mark.parametrize("beside", ["vllm", "sglang=/x"])
def test_another_server_needs_a_known_name_and_a_path(capsys, beside):
    with pytest.raises(SystemExit):
        main([*TINY, "--beside", beside])
    assert f"--beside {beside}: give NAME=PATH, of vllm, llamacpp" in capsys.readouterr().err
