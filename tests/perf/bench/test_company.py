"""The price of company, of a tiny model for a moment."""

from __future__ import annotations

import json

from chorus.perf.bench.company import main


def test_each_number_of_sequences_has_its_ratio(capsys):
    assert (
        main(["--model-size", "tiny", "--sequences", "1", "9", "--steps", "2", "--rounds", "1", "--threads", "1"]) == 0
    )
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["sequences"] for row in rows] == [1, 9]
    assert all(row["base"] > 0 and row["mixed"] > 0 and row["ratio"] > 0 for row in rows)
