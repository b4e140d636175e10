"""The price of company, of a tiny model for a moment."""

from __future__ import annotations

import json

from chorus.perf.bench import company
from chorus.perf.bench.company import main
from chorus.perf.bench.models.random_mixture import MixtureShape


def test_each_number_of_sequences_has_its_ratio(capsys):
    assert (
        main(["--model-size", "tiny", "--sequences", "1", "9", "--steps", "2", "--rounds", "1", "--threads", "1"]) == 0
    )
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["sequences"] for row in rows] == [1, 9]
    assert all(row["base"] > 0 and row["mixed"] > 0 and row["ratio"] > 0 for row in rows)


def test_a_mixture_has_a_row_for_each_kind_of_adapter(capsys, monkeypatch):
    shape = MixtureShape(2, 128, 64, 8, 2, 4, 2, 32, 512)
    monkeypatch.setattr(company, "SHAPE", shape)
    assert main(["--model-size", "mixture", "--sequences", "2", "--steps", "2", "--rounds", "1", "--threads", "1"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["sequences"], row["adapters"]) for row in rows] == [(2, "attention"), (2, "experts")]
    assert all(row["base"] > 0 and row["mixed"] > 0 and row["ratio"] > 0 for row in rows)
