"""Saved slots beside: our part with a tiny model, llama.cpp's played by a script."""

from __future__ import annotations

import json

import pytest

from chorus.perf.bench import llamacpp_slots
from chorus.perf.bench.llamacpp_slots import goals, main, rows_of

PROGRAM = """#!/bin/sh
wc -w >&2
test -d "$2" && echo '{"computed": [2.0, 4.0], "saved": [1, 1], "restored": [0.25, 0.75], "bytes": 6000000, "equal": 2}'
"""


def test_rows_hold_each_place_against_computing_and_against_the_peers_slots():
    peer = {"computed": [4.0], "restored": [1.0]}
    computed, host, files = rows_of({"computed": [2.0], "host": [0.2], "files": [0.5]}, peer)
    assert (computed["share"], computed["peer_share"], computed["over_peer"]) == (1.0, 1.0, 0.5)
    assert (host["share"], host["peer_share"], host["over_peer"]) == (0.1, 0.25, 0.2)
    assert (files["share"], files["over_peer"]) == (0.25, 0.5)
    assert all(goal.met for goal in goals([computed, host, files]))
    assert not any(goal.met for goal in goals(rows_of({"computed": [1.0], "host": [1.1]}, peer)))


def test_each_prompt_is_computed_then_comes_from_host_memory_and_from_files(tmp_path, monkeypatch, capsys):
    """`_first_token` raises an error if not."""
    pytest.importorskip("gguf")
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(llamacpp_slots, "build", lambda tree, work: program)
    main([str(tmp_path), "--model-size", "tiny", "--prompts", "2", "--tokens", "100", "--threads", "1"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["prefix"] for row in said["rows"]] == ["computed", "host", "files"]
    assert (said["peer_megabytes"], said["peer_equal"]) == (3.0, 2)
