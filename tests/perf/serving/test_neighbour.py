"""The measurement of a neighbour beside a flood, for a moment on a real server."""

from __future__ import annotations

import json

import pytest

from chorus.perf.serving.neighbour import FLOODS, main


@pytest.mark.wide
@pytest.mark.parametrize("kind", FLOODS)
def test_a_moment_of_a_flood(capsys, kind):
    code = main(["--kinds", kind, "--seconds", "0.2", "--clients", "2", "--tokens", "60"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code in (0, 1), "whether it meets its goals depends on the machine"
    for values in found["floods"][kind].values():
        assert values["alone"] > 0
        assert values["beside"] > 0
    assert {*found["floods"][kind]} == {"0", "auto"}


def test_a_flood_that_is_refused_is_told(capsys):
    assert main(["--kinds", "echo", "--seconds", "0.2", "--tokens", "5000"]) == 2
    assert "a request of the flood failed" in capsys.readouterr().err
