"""The benchmark of activated LoRA shares the base model's prefix, and says whether the bars are met."""

from __future__ import annotations

import json

import pytest

from chorus.perf.bench import activated
from chorus.perf.bench.activated import main

FLAGS = ["--size", "tiny", "--adapters", "2", "--rank", "4", "--prefix", "40", "--rounds", "1", "--threads", "1"]


@pytest.mark.parametrize(("bar", "code"), [(1e9, 0), (0.0, 1)])
def test_the_ratio_to_the_base_model_is_judged(monkeypatch, capsys, bar, code):
    monkeypatch.setattr(activated, "BAR", bar)
    assert main(FLAGS) == code
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["met"] is (code == 0)
    assert result["cached"] == {"None": 32, "a0": 32, "a1": 32}
    assert set(result["ratios"]) == {"a0", "a1"}
