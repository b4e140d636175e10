"""The study of copies beside computing: its share follows from its times."""

from __future__ import annotations

import itertools

import pytest

from chorus.perf.bench import copy_beside
from chorus.perf.bench.copy_beside import Case, main, measure
from chorus.perf.bench.models.sizes import Geometry

TINY = Geometry(hidden=32, ffn=64, layers=2, heads=2, kv_heads=1, vocab=64)


def test_the_share_is_of_the_processor_time_of_both():
    spent = itertools.cycle((0, 1, 0, 4))
    found = measure(Case(TINY, 8, 4), 3, lambda: next(spent))
    assert (found["copy"], found["compute"]) == (1, 4)
    assert found["share"] == pytest.approx(0.2)
    assert found["num_bytes"] == 8 * 2 * 2 * 2 * 16


def test_it_runs_by_one_command(capsys, monkeypatch):
    monkeypatch.setattr(copy_beside.torch, "set_num_threads", lambda count: None)
    assert main(["--sizes", "tiny", "--prefix", "16", "--rest", "2", "--rounds", "1"]) == 0
    assert "tiny" in capsys.readouterr().out
