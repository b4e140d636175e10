"""The page of measurements is drawn from their files, and is as they are."""

from __future__ import annotations

import json

from chorus.perf.report.history import COMMANDS, RESULTS, main, page

GONE = {
    "chunk_difference",
    "company_mixture",
    "families",
    "images",
    "library_trials",
    "llamacpp_slots",
    "llamacpp_steps",
    "prefixes",
}
"""Results of benches that are gone."""


def test_the_page_is_not_stale():
    assert main(["--check"]) == 0


def test_a_line_for_each_folder_the_newest_first(tmp_path):
    found = {"answers": 9, "wrong": 0, "lost": 1, "delayed": 2, "longest_delay": 0.5}
    for folder in ("cpu-2026-01-02-abcdef1", "cpu-2026-03-04-abcdef2", "h-2026-03-04-abcdef2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "about.txt").write_text("two cores, busy\n")
        (tmp_path / folder / "killed_replica.json").write_text(json.dumps(found))
    lines = [line for line in page(tmp_path).splitlines() if line.startswith("| 2026")]
    assert lines == [
        "| 2026-03-04 | abcdef2 | two cores, busy | 9 | 0 | 1 | 2 | 0.50 |",
        "| 2026-01-02 | abcdef1 | two cores, busy | 9 | 0 | 1 | 2 | 0.50 |",
    ]
    assert main(["--check", "--results", str(tmp_path)]) == 1
    assert main(["--results", str(tmp_path)]) == 0 == main(["--check", "--results", str(tmp_path)])


def test_each_file_that_is_kept_has_a_table_or_is_known():
    for folder in RESULTS.glob("cpu-*"):
        names = {path.stem for path in folder.glob("*.json")}
        assert names <= {*COMMANDS, *GONE}
        assert (folder / "about.txt").read_text().strip()
