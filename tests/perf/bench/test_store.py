"""Result files: whole or not at all, related results, missing results."""

from __future__ import annotations

import json
import math

import pytest

from chorus.perf.bench.store import DONE, RESULT, RUNNING, OtherSettings, ResultStore

CLEAN = {"hash": "abc", "dirty": False}
ENVIRONMENT = {"commit": CLEAN, "device": {"name": "X"}}


def test_a_section_is_done_once_written(tmp_path):
    store = ResultStore(tmp_path, {"run": "quick"})
    assert store.load("limits") is None
    assert store.status("limits") != DONE
    store.write("limits", 1.25, ENVIRONMENT, values={"a": 1})
    assert store.status("limits") == DONE
    assert ResultStore(tmp_path, {"run": "quick"}).values("limits") == {"a": 1}
    store.forget("limits")
    assert store.status("limits") != DONE


def test_a_failed_section_has_no_values(tmp_path):
    store = ResultStore(tmp_path, {})
    store.write("sgmv", 1.0, ENVIRONMENT, error="Traceback\nBoom")
    assert store.status("sgmv") != DONE
    with pytest.raises(LookupError, match="section sgmv has no results"):
        store.values("sgmv")


def test_rows_of_a_section_that_did_not_end_are_kept(tmp_path):
    store = ResultStore(tmp_path, {})
    store.save("sgmv", 1.0, ENVIRONMENT, {"cells": [1, 2]})
    assert store.status("sgmv") != DONE
    assert store.status("sgmv") == RUNNING
    assert store.combine(["sgmv"], ENVIRONMENT)["failed"] == {"sgmv": "it did not end"}
    store.write("sgmv", 9.0, ENVIRONMENT, error="not done after 200 s")
    assert store.status("sgmv") != RUNNING
    found = store.combine(["sgmv"], ENVIRONMENT)
    assert (found["sections"], found["partial"]) == ({}, {"sgmv": {"cells": [1, 2]}})
    assert found["failed"] == {"sgmv": "not done after 200 s"}
    with pytest.raises(LookupError):
        store.values("sgmv")
    assert store.values("sgmv", partial=True) == {"cells": [1, 2]}


def test_results_of_other_settings_are_refused(tmp_path):
    ResultStore(tmp_path, {"run": "quick"}).write("limits", 1.0, ENVIRONMENT, values={})
    store = ResultStore(tmp_path, {"run": "full"})
    store.check(["sgmv"])
    with pytest.raises(OtherSettings, match=r"limits\.json was measured with run quick, this run has run full"):
        store.check(["sgmv", "limits"])


def test_a_file_is_whole_or_not_there(tmp_path):
    store = ResultStore(tmp_path, {})
    store.write("limits", 1.0, ENVIRONMENT, values={"a": 1})
    with pytest.raises(TypeError):
        store.write("limits", 1.0, ENVIRONMENT, values={"a": object()})
    assert store.values("limits") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["limits.json"]


def test_numbers_that_json_has_no_words_for_become_null(tmp_path):
    store = ResultStore(tmp_path, {})
    store.write("limits", 1.0, ENVIRONMENT, values={"a": [math.nan, (math.inf, 1.5)]})
    assert json.loads(store.path("limits").read_text("utf-8"))["values"] == {"a": [None, [None, 1.5]]}


def test_all_in_one_file(tmp_path):
    store = ResultStore(tmp_path, {"run": "quick"})
    store.write("limits", 1.0, ENVIRONMENT, values={"a": 1})
    store.write("sgmv", 2.0, ENVIRONMENT, error="Boom")
    found = store.combine(["limits", "sgmv", "decode"], {"commit": CLEAN, "device": {"name": "unopened"}})
    assert found["sections"] == {"limits": {"a": 1}}
    assert found["failed"] == {"sgmv": "Boom"}
    assert found["missing"] == ["decode"]
    assert found["environment"] == ENVIRONMENT, "a section that ran knows best where"
    assert found["one_commit"]
    assert json.loads((tmp_path / RESULT).read_text("utf-8")) == found


@pytest.mark.parametrize("other", [{"hash": "abd", "dirty": False}, {"hash": "abc", "dirty": True}])
def test_sections_of_several_commits_are_told(tmp_path, other):
    store = ResultStore(tmp_path, {})
    store.write("limits", 1.0, {**ENVIRONMENT, "commit": other}, values={})
    store.write("sgmv", 1.0, ENVIRONMENT, values={})
    assert not store.combine(["limits", "sgmv"], ENVIRONMENT)["one_commit"]
