"""Plans that can't be carried out are refused before a replica begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from chorus.server.cluster.plan import Plan
from chorus.server.cluster.processes import Processes
from chorus.server.settings import Settings


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(listen="tcp://0.0.0.0:0"), "not loopback"),
        (Plan(listen="127.0.0.1:7000"), "no address"),
        (Plan(registry="tcp://127.0.0.1:7000"), "--secret-file"),
        (Plan(tls=Path("/nowhere")), r"/nowhere must hold tls\.crt, tls\.key and ca\.crt"),
        (Plan(secret_file=Path("/nowhere/secret")), "No such file"),
        (Plan(secret_file=Path(__file__)), "holds no secret"),
        (Plan(ray="127.0.0.1:6379"), "--secret-file"),
    ],
)
def test_a_plan_that_can_t_be_carried_out_leaves_nothing(monkeypatch, tmp_path, plan, text):
    if plan.ray is not None:
        pytest.importorskip("ray")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Exception, match=text):
        Processes(plan, Settings())
    assert not list(tmp_path.iterdir())
