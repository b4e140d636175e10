"""The measurement of a neighbour beside a flood, for a moment on a real server."""

from __future__ import annotations

import json

import pytest

from chorus.perf.serving.neighbour import FLOOD, FLOODS, NEIGHBOUR, launched, main, measured


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(0o600)
    keys.write_text(f"{NEIGHBOUR} neighbour\n{FLOOD} flood\n")
    with launched(["--api-key-file", str(keys)]) as found:
        yield found


@pytest.mark.wide
@pytest.mark.parametrize("kind", FLOODS)
def test_a_moment_of_a_flood(server, kind):
    values = measured(server.url, kind, seconds=0.2, clients=2, tokens=60)
    assert values["alone"] > 0
    assert values["beside"] > 0


def test_each_target_has_a_server(capsys):
    code = main(["--kinds", "echo", "--seconds", "0.2", "--clients", "1", "--tokens", "60"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code in (0, 1), "whether it meets its goals depends on the machine"
    assert {*found["floods"]["echo"]} == {"0", "auto"}


def test_a_flood_that_is_refused_is_told(capsys):
    assert main(["--kinds", "echo", "--seconds", "0.2", "--tokens", "5000"]) == 2
    assert "a request of the flood failed" in capsys.readouterr().err
