"""The time of a front's decisions, of a few."""

from __future__ import annotations

import json

import pytest

from chorus.perf.serving.decision_time import main


@pytest.mark.wide
def test_every_policy_decides_beside_a_real_front(capsys):
    assert main(["--decisions", "3", "--adapters", "40", "--limit", "1e9"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["met"] is True
