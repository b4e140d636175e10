"""Adapters on disk that all differ, and the measurement of a server that has them."""

from __future__ import annotations

import json
import sys

from chorus.perf.bench.many_adapters import WEIGHTS, main
from chorus.perf.bench.models.random_model import RandomModel, adapters
from chorus.perf.bench.models.sizes import SIZES


def test_a_moment_with_a_few_dozen(capsys, tmp_path):
    flags = ["--adapters", "80", "--requests", "60", "--clients", "2", "--memory", "16MiB", "--work-dir", str(tmp_path)]
    assert main([*flags, "--model-size", "tiny"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["hot"]["requests"] + found["cold"]["requests"] == 60 and not found["errors"]
    assert 0 < found["cold"]["requests"] <= 60 and found["cold"]["p50"] > 0 < found["bytes_at_start"]
    (folder,) = (path for path in tmp_path.iterdir() if path.name.startswith("many-"))
    contents = {(one / WEIGHTS).read_bytes() for one in folder.iterdir()}
    assert len(contents) == 80, "each adapter is another"
    model = RandomModel(SIZES["tiny"].geometry, (4,))
    (source,) = adapters(model, tmp_path).values()
    assert {len(each) for each in contents} == {(source / WEIGHTS).stat().st_size}


_AS_VLLM = """#!/bin/sh
# vllm serve MODEL --host HOST --port PORT …
exec {python} -m chorus.server serve --model "$2" --host "$4" --port "$6" --memory-bytes 16MiB --speculation off \\
  --adapters "$VLLM_LORA_RESOLVER_CACHE_DIR"
"""


def test_another_server_gets_the_same_requests(capsys, tmp_path):
    peer = tmp_path / "env" / "bin" / "vllm"
    peer.parent.mkdir(parents=True)
    peer.write_text(_AS_VLLM.format(python=sys.executable))
    peer.chmod(0o755)
    flags = ["--adapters", "8", "--requests", "12", "--clients", "2", "--memory", "16MiB", "--model-size", "tiny"]
    assert main([*flags, "--work-dir", str(tmp_path), "--vllm", str(peer)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (peer_name, beside), *others = found["beside"].items()
    assert peer_name == "vllm" and not others and beside["errors"] == 0
    for each in (found, beside):
        assert each["hot"]["requests"] + each["cold"]["requests"] == 12
    assert found["cold"]["requests"] == beside["cold"]["requests"]
