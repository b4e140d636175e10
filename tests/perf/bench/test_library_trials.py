"""The comparison of libraries with code of ours."""

from __future__ import annotations

import json

import pytest

from chorus.perf.bench.library_trials import ATTACKS, PATTERNS, http, main, patterns, text


def test_our_matcher_finds_what_re_finds_and_takes_hostile_patterns():
    found = patterns()
    assert {*found} == {*PATTERNS}
    for kind in list(PATTERNS)[:3]:
        assert found[kind]["ours"]["found"] == found[kind]["re"]["found"] > 0
    assert all(isinstance(each["ours"]["found"], int) for each in found.values())


def test_pieces_of_our_detokenizer_make_up_the_text():
    found = text(count=500)
    assert found["ours"]["wrong"] == found["ours"]["cut"] == 0
    assert found["DecodeStream"]["of"] == found["ours"]["of"] > 0


@pytest.mark.wide
def test_our_protocol_ends_each_attack():
    attacks = http(requests=10)["ours"]["attacks"]
    assert {*attacks} == {*ATTACKS} and {*attacks.values()} == {"closed", "refused"}


def test_the_command_tells_its_results(capsys):
    assert main(["--trials", "patterns"]) == 0
    assert {*json.loads(capsys.readouterr().out.splitlines()[-1])} == {"device", "patterns"}
