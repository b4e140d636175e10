from __future__ import annotations

import json

import pytest

from chorus.memory.adapter_config import CONFIG_FILE, AdapterConfig
from chorus.memory.adapter_error import AdapterFormatError
from chorus.memory.name_pattern import MAX_CHARACTERS, MatchTime, NamePattern

ENDLESS = r"(a|a)*(a|a)*(a|a)*\d"
NAME = "a" * 60 + "!"


def test_a_match_is_what_the_standard_library_finds():
    pattern = NamePattern(r"layers\.(?P<idx>\d+)", ValueError, MatchTime(), r"(.*\.)?({})\.")
    assert pattern.match("model.layers.12.mlp")["idx"] == "12"
    assert pattern.match("model.layers.x.mlp") is None
    assert NamePattern("ab", ValueError, MatchTime()).fullmatch("abc") is None


def test_an_endless_match_is_given_up():
    left = MatchTime(0.05)
    with pytest.raises(ValueError, match="takes too long"):
        NamePattern(ENDLESS, ValueError, left).fullmatch(NAME)
    with pytest.raises(ValueError, match="takes too long"):  # the file's time is used up
        NamePattern("a", ValueError, left).match("a")


@pytest.mark.parametrize("bad", ["(", "a{2}{3}++", r"\p{L}", "a" * (MAX_CHARACTERS + 1)])
def test_what_python_takes_for_no_expression_is_refused(bad):
    with pytest.raises(ValueError, match=r"is no regular expression|characters, at most"):
        NamePattern(bad, ValueError, MatchTime())


@pytest.mark.parametrize(
    "field, value",
    [("target_modules", ENDLESS), ("rank_pattern", {ENDLESS: 4}), ("alpha_pattern", {ENDLESS: 4}),
     ("exclude_modules", ENDLESS)],
)  # fmt: skip
def test_an_adapter_with_one_is_refused_by_the_field(tmp_path, monkeypatch, field, value):
    monkeypatch.setattr("chorus.memory.adapter_config.MatchTime", lambda: MatchTime(0.05))
    (tmp_path / CONFIG_FILE).write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "target_modules": [NAME]} | {field: value})
    )
    config = AdapterConfig.read(tmp_path)
    with pytest.raises(AdapterFormatError, match=rf"{field} is .*takes too long"):
        config.is_target(NAME)
        config.rank_and_scale(NAME)
