"""The section of prefixes in three tiers: it reaches every tier, and reads what it needs."""

from __future__ import annotations

import pytest

from chorus.memory.disk import tier
from chorus.perf.bench.options import Options
from chorus.perf.bench.sections import prefixes


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefixes")
    options = ["--quick", "--device", "cpu", "--out", str(folder / "out"), "--work-dir", str(folder / "work")]
    with pytest.MonkeyPatch.context() as patch:
        # so small a model computes a prompt sooner than a busy machine reads it, and what was read is of no use then
        patch.setattr(tier.DiskTier, "is_coming", lambda self, job: not job.has_ended)
        # while one thread finds that a block is missing, another reads the next one, which is much of so short a prompt
        patch.setattr(tier, "READERS", 1)
        return prefixes.run(Options.parse(options).context())


def test_requests_reach_every_tier(values):
    assert values.get("not_measured") is None
    rows = {row["requests"]: row for row in values["rows"]}
    assert set(rows) == {"zipf", "uniform", "begun anew, files in memory", "begun anew, files dropped"}
    assert sum(row["host_requests"] + row["pool_requests"] for row in rows.values()) > 0
    assert rows["begun anew, files in memory"]["files_requests"] > 0
    assert rows["begun anew, files dropped"]["files_requests"] > 0


def test_an_engine_reads_what_it_needs(values):
    assert values["read_over_needed"] == pytest.approx(1.0, abs=0.05)


def test_prompts_that_host_memory_can_t_hold_are_found(values):
    rows = {row["asked"]: row for row in values["rounds"]}
    assert set(rows) == {"one after another", "at once"}
    for row in rows.values():
        assert min(row["killed"], row["again"]) >= prefixes.LEAST_HITS, row


def test_goals_and_tables_tell_what_was_measured(values):
    assert len(prefixes.goals(values)) >= 3
    assert all(table.rows for table in prefixes.tables(values))


def test_nothing_is_claimed_of_what_was_not_measured():
    assert prefixes.goals({"rows": []}) == []
