"""Activated adapters go on with the base model's KV of a long prompt, and plain ones do not."""

from __future__ import annotations

import json

import pytest

from chorus.perf.bench import invocations
from chorus.perf.bench.invocations import main

FLAGS = ["--size", "tiny", "--prompt", "64", "--rounds", "2", "--invocations", "2", "--rank", "4", "--threads", "1"]


@pytest.mark.parametrize(("most", "code"), [(1e9, 0), (0.0, 1)])
def test_the_ratio_to_a_plain_adapter_is_judged(monkeypatch, capsys, most, code):
    monkeypatch.setattr(invocations, "MOST", most)
    assert main(FLAGS) == code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["cached"] == {"plain": 0, "base": 0, "activated": 64}
    assert {kind: len(each) for kind, each in found["seconds"].items()} == {"plain": 2, "base": 2, "activated": 4}
