"""Adapters on disk that all differ, and the measurement of a server that has them."""

from __future__ import annotations

import json

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
