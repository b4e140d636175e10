"""The benchmark of adapters' time measures builds in turns, in processes of their own, and judges the bars."""

from __future__ import annotations

import json
import sys

import pytest

from chorus.memory.adapters.adapter import Tier
from chorus.perf.bench import adapter_step
from chorus.perf.bench.adapter_step import Build, Turn, conclude, main
from chorus.perf.bench.models.sizes import SIZES
from chorus.perf.bench.subject import Subject

FLAGS = ["--model-size=tiny", "--steps=2"]


@pytest.mark.wide
def test_builds_take_turns_in_processes_of_their_own(monkeypatch, capsys):
    made = []

    class Recorded(Build):
        def __init__(self, python, arguments):
            super().__init__(python, arguments)
            made.append((python, self._process))

    monkeypatch.setattr(adapter_step, "Build", Recorded)
    main([*FLAGS, "--rounds=2", "--beside", sys.executable])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [python for python, _ in made] == [sys.executable] * 2
    assert [process.returncode for _, process in made] == [0, 0]  # both have ended
    assert {name: len(turns) for name, turns in result["turns"].items()} == {"this": 2, "beside": 2}
    assert all(base > 0 and mixed > 0 for turns in result["turns"].values() for base, mixed in turns)


@pytest.mark.parametrize(
    ("added", "rate_met", "time_met"), [(2.5, True, True), (2.6, True, False), (3.5, False, False)]
)
def test_the_bars_hold_what_adapters_add_in_a_round_against_the_build_beside(capsys, added, rate_met, time_met):
    # a round in which all take twice the time changes no ratio
    turns = {
        "this": [Turn(10.0, 10.0 + added), Turn(20.0, 20.0 + 2 * added)],
        "beside": [Turn(10.0, 13.0), Turn(20.0, 26.0)],
    }
    code = conclude(turns)
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["over_beside"] == pytest.approx(added / 3)
    assert result["rates"] == {"this": pytest.approx(10 / (10 + added)), "beside": pytest.approx(10 / 13)}
    assert result["met"] is (rate_met and time_met) and code == (not result["met"])
    assert out.count("MISSED") == (not rate_met) + (not time_met)


def test_without_another_build_only_the_rate_is_judged(capsys):
    assert conclude({"this": [Turn(10.0, 12.0)]}) == 0
    assert "over_beside" not in json.loads(capsys.readouterr().out.splitlines()[-1])


def test_beside_adapters_on_the_head_the_base_model_keeps_its_rate(capsys):
    assert conclude({"this": [Turn(10.0, 10.4)]}, "head") == 1
    assert conclude({"this": [Turn(10.0, 10.2)]}, "head") == 0
    assert [json.loads(line)["load"] for line in capsys.readouterr().out.splitlines() if line[0] == "{"] == ["head"] * 2


@pytest.mark.parametrize("load", ["head", "mixed", "added", "rows"])
def test_the_rows_of_a_load(monkeypatch, load):
    """Adapters that are measured are those that the load is named for."""
    seen = []
    monkeypatch.setattr(Subject, "decode_seconds", lambda self, names, *of: seen.append((self, names)) or [1.0])
    targets, tokens = [], []

    def turns(turn):
        turn()
        store = seen[0][0].engine.store
        manifests = [store.get(name).manifest for name in seen[1][1] if name is not None]
        targets.extend(manifest.targets for manifest in manifests)
        tokens.extend((manifest.num_tokens, max(part.rank for part in manifest.parts)) for manifest in manifests)

    adapter_step.measure("tiny", load, 2, 1, turns)
    assert seen[0][1] == [None] * 8 and len(seen[1][1]) == 8
    of_tokens = {"q_proj", "embed_tokens_rows", "lm_head_rows"}
    wanted = {"head": {"lm_head"}, "added": of_tokens, "rows": of_tokens}
    assert len(targets) == (8 if load == "mixed" else 4)
    assert all(len(each) == 7 if load == "mixed" else {*each} == wanted[load] for each in targets)
    vocab = SIZES["tiny"].geometry.vocab
    assert load != "added" or {*tokens} == {(vocab + 8, 8)}
    assert load != "rows" or {*tokens} == {(0, vocab // 4)}


def test_an_engine_with_adapters_that_no_row_uses_is_held_against_one_without(monkeypatch):
    asked = []

    def decode_seconds(self, names, *of):
        store = self.engine.store
        resident = [name for name in store.names() if store.tier(store.get(name)) is Tier.DEVICE]
        asked.append((len(resident), {store.get(name).manifest.targets for name in resident}, list(names)))
        return [2.0 + len(asked) if resident else 1.0 + len(asked)]

    monkeypatch.setattr(Subject, "decode_seconds", decode_seconds)
    found = []
    adapter_step.measure("tiny", "unused", 2, 1, lambda turn: found.extend([turn(), turn()]))
    assert [count for count, _, _ in asked] == [0, 4, 4, 0] * 2
    assert all(targets == {("lm_head",)} for count, targets, _ in asked if count)
    assert all(names == [None] * 8 for _, _, names in asked)
    assert found == [Turn(2.0, 4.0), Turn(6.0, 8.0)]  # the quieter of two, with the order turned round


def test_adapters_that_no_row_uses_may_cost_a_hundredth(capsys):
    assert conclude({"this": [Turn(10.0, 10.2)]}, "unused") == 1
    assert conclude({"this": [Turn(10.0, 10.05)]}, "unused") == 0
    assert "MISSED" in capsys.readouterr().out


def test_a_build_that_ends_is_an_error(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 2\n")
    python.chmod(0o700)
    build = Build(str(python), ["--model-size=none"])
    with build, pytest.raises(RuntimeError, match="ended with code 2"):
        build.turn()
