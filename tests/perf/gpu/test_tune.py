"""Making a table of schedules: candidates, the choice among them, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from chorus.ops.schedule_check import check_schedule
from chorus.ops.schedule_table import ScheduleTable, ScheduleTableError
from chorus.ops.sgmv_schedule import RANK_CLASSES
from chorus.perf.gpu import tune, tune_search
from chorus.perf.gpu.environment import describe_host
from chorus.perf.gpu.store import OtherSettings
from chorus.perf.gpu.tune_bench import step
from chorus.perf.gpu.tune_search import OPTIONS, Bucket, Unfit, candidates, search

BUCKET = Bucket("decode", 32, 64, 2)
BUCKETS = [
    Bucket(kind, tokens, rank, itemsize)
    for kind, most in (("decode", (1, 8, 64, 256)), ("prefill", (256, 1024, 8192)))
    for tokens in most
    for rank in RANK_CLASSES
    for itemsize in (2, 4)
]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_candidates_are_schedules_that_a_table_may_name(bucket):
    rule, fields = bucket.rule(), Counter()
    for name in OPTIONS[bucket.kind]:
        for candidate in candidates(bucket, rule, name):
            check_schedule(candidate, bucket.max_rank, bucket.itemsize)
            assert candidate.tensor_cores == rule.tensor_cores
            assert getattr(candidate, name) != getattr(rule, name)
            fields[name] += 1
    assert len(fields) >= 5, "a search of too little"


def test_the_fastest_of_all_fields_is_found():
    """Fields that gain one by one gain together."""
    best = search(BUCKET, lambda bucket, it: 10 - 2 * (it.max_splits == 32) - (it.block_n == 128) - (it.lanes == 2))
    assert best.schedule == replace(BUCKET.rule(), max_splits=32, block_n=128, lanes=2)
    assert (best.us, best.rule_us) == (6, 10)
    assert best.unfit == ()


@pytest.mark.parametrize(("us", "kept"), [(9.81, False), (9.79, True)])
def test_the_rules_stay_where_little_is_gained(us, kept):
    rule = BUCKET.rule()
    found = search(BUCKET, lambda bucket, it: us if it.warps == 8 else 10)
    assert found.schedule == (replace(rule, warps=8) if kept else rule)
    assert (found.us, found.rule_us) == (us if kept else 10, 10)


def test_a_time_that_luck_made_is_measured_again():
    times = iter([10, 5])  # the rules', then a candidate's once
    assert search(BUCKET, lambda bucket, it: next(times, 10)).schedule == BUCKET.rule()


def test_what_is_unfit_is_left_out():
    def measure(bucket, schedule):
        if schedule.warps == 8:
            raise Unfit("spills")
        return 10 - (schedule.warps == 2)

    found = search(BUCKET, measure)
    assert found.schedule.warps == 2
    assert len(found.unfit) == 1
    assert found.unfit[0].endswith("spills")

    def fail(bucket, schedule):
        raise Unfit("differs")

    with pytest.raises(Unfit, match="differs"):
        search(BUCKET, fail)


def test_what_a_bucket_is_measured_with():
    assert step(Bucket("decode", 5, 64, 2)) == ([1] * 5, [64, 32, 16, 8, 64])
    assert step(Bucket("decode", 1, 20, 2)) == ([1], [20])
    assert step(Bucket("prefill", 256, 64, 2)) == ([256], [64])
    assert step(Bucket("prefill", 8192, 16, 2)) == ([2048] * 4, [16] * 4)


@pytest.mark.parametrize(
    "flags", [("--device", "cpu"), ("--model-size", "tiny"), ("--max-ranks", "16")], ids=lambda flags: flags[0]
)
def test_no_part_or_smoke_run_is_written_into_the_repository(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "measure", lambda *args: pytest.fail("nothing may be measured for it"))
    with pytest.raises(SystemExit) as end:
        tune.main(["--write", "--out", str(tmp_path), *flags])
    assert end.value.code == 2
    assert "--write: only a GPU's whole table" in capsys.readouterr().err


def test_a_table_is_written_where_serving_finds_it(tmp_path, monkeypatch, capsys):
    """As a GPU's would be: what the command writes, start-up reads."""
    found = search(BUCKET, lambda bucket, it: 10 - 2 * (it.warps == 8))
    values = {
        "format": 1, **describe_host("cuda"), "device": {"type": "cuda", "name": "Test GPU", "l2_bytes": 1},
        "model": tune.MODEL, "method": "none", "entries": [found.entry()],
    }  # fmt: skip
    monkeypatch.setattr(tune, "measure", lambda *args: values)
    monkeypatch.setattr(tune, "FOLDER", tmp_path / "schedules")
    assert tune.main(["--write", "--out", str(tmp_path / "out")]) == 0
    for folder in ("out", "schedules"):
        (entry,) = ScheduleTable.load(tmp_path / folder / "test-gpu.json").entries
        assert entry.schedule == found.schedule
    assert json.loads(capsys.readouterr().out) == {"entries": 1, "changed": 1, "largest_gain": pytest.approx(0.2)}


def test_smoke_run(tmp_path, monkeypatch):
    """The command itself, kernels interpreted; what it writes is no table."""
    pytest.importorskip("triton")
    program = (
        "from chorus.perf.gpu import tune, tune_search as search; "
        "search.OPTIONS = {'decode': {'max_splits': (32,)}, 'prefill': {'stages': (2,)}}; "
        "raise SystemExit(tune.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--device", "cpu", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["entries"] == 2
    assert summary["note"] == tune.SMOKE
    values = json.loads((tmp_path / "cpu.json").read_text("utf-8"))
    assert values["note"] == tune.SMOKE
    assert all(entry["us"] > 0 for entry in values["entries"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command sets it; this sets it back
    monkeypatch.setattr(tune_search, "search", lambda *args: pytest.fail("all entries are there"))
    assert tune.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "cpu.json").read_text("utf-8"))["entries"] == values["entries"]
    monkeypatch.setattr(tune, "describe", lambda device: describe_host(device) | {"commit": {"hash": "another"}})
    with pytest.raises(OtherSettings, match="another"):
        tune.main(["--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(ScheduleTableError, match=r"device\.type is 'cpu'"):
        ScheduleTable.load(tmp_path / "cpu.json")
