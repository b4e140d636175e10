"""Steps with compiled parts beside torch's operators; the compiler itself is left out."""

from __future__ import annotations

import json

import pytest

from chorus.perf.cpu import compiled
from chorus.perf.cpu.workload import Geometry


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_computes_the_same_step(monkeypatch, capsys, dtype):
    tiny = Geometry(hidden=32, ffn=48, layers=2, heads=2, kv_heads=1, vocab=96, positions=64)
    functions = []
    monkeypatch.setattr(compiled, "_compiled", lambda function: functions.append(function.__name__) or function)
    monkeypatch.setattr(compiled, "GEOMETRIES", {"tiny": tiny})
    options = ["--models", "tiny", "--dtypes", dtype, "--rows", "1", "3", "--context", "20", "--seconds", "0.01"]
    assert compiled.main(options) == 0
    (one, three) = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert (one["rows"], three["rows"]) == (1, 3)
    for case in (one, three):
        assert list(case["ways"]) == ["eager", "elementwise", "products"]
        assert all(way["differs"] <= 1e-5 and way["ms"] > 0 for way in case["ways"].values())
    assert set(functions) == {"rms_norm", "add_rms_norm", "rotate_and_write", "silu_and_mul", "_normed_product"}
