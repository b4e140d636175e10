"""Tables of schedules: what they refuse, and which schedule a step gets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.ops.schedule_check import SHARED_LIMIT, check_schedule, shared_bytes
from chorus.ops.schedule_table import (
    FOLDER,
    ScheduleTable,
    ScheduleTableError,
    TableSchedules,
    device_key,
    schedules_for,
)
from chorus.ops.sgmv_schedule import RuleSchedules, decode, prefill

from .schedule_files import contents, write_table

NAME = "NVIDIA H200"
SMALL, LARGE = replace(decode(8, 64), max_splits=8), replace(decode(64, 64), warps=8)
LONG = replace(prefill(512, 64), stages=2)
LINES = (
    ("decode", 32, 64, 2, LARGE),
    ("decode", 4, 64, 2, SMALL),
    ("prefill", 512, 64, 2, LONG),
)


def make(lines=LINES) -> TableSchedules:
    return TableSchedules(ScheduleTable.parse(contents(NAME, lines), "test"), "test")


@pytest.mark.parametrize(
    ("name", "key"),
    [(NAME, "nvidia-h200"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"), (" RTX  6000/Ada ", "rtx-6000-ada")],
)
def test_device_key(name, key):
    assert device_key(name) == key


def test_a_device_without_a_name_has_no_key():
    with pytest.raises(ValueError, match="letters or digits"):
        device_key("--")


def test_the_next_entry_at_or_above_is_taken():
    found = make()
    assert [found.decode(tokens, 64, 2) for tokens in (1, 4, 5, 32)] == [SMALL, SMALL, LARGE, LARGE]
    assert [found.prefill(tokens, 64, 2) for tokens in (1, 512)] == [LONG, LONG]


def test_what_the_table_lacks_is_by_the_rules():
    found = make()
    assert found.decode(33, 64, 2) == decode(33, 64), "above the largest entry"
    assert found.decode(4, 16, 2) == decode(4, 16), "another rank"
    assert found.decode(4, 64, 4) == decode(4, 64), "another size of elements"
    assert found.prefill(513, 64, 2) == prefill(513, 64)
    assert found.prefill(512, 64, 4) == prefill(512, 64, 4)


@given(
    st.lists(st.integers(1, 3000), max_size=5, unique=True),
    st.integers(1, 3000),
    st.sampled_from(["decode", "prefill"]),
    st.data(),
)
def test_between_limits_there_is_one_schedule(buckets, most, kind, data):
    """The schedules compiled ahead, one per limit, are all that a step may take."""
    rule = decode if kind == "decode" else prefill
    lines = [(kind, tokens, 64, 2, replace(rule(tokens, 64), stages=1 + i)) for i, tokens in enumerate(buckets)]
    found = make(lines) if lines else RuleSchedules()
    limits = found.token_limits(kind, most)
    assert limits == sorted(limits)
    assert limits[-1] == most
    tokens = data.draw(st.integers(1, most))
    limit = next(limit for limit in limits if limit >= tokens)
    pick = getattr(found, kind)
    assert pick(tokens, 64, 2) == pick(limit, 64, 2)


def test_a_device_takes_its_own_file(tmp_path):
    write_table(tmp_path, NAME, LINES)
    found = schedules_for(NAME, tmp_path)
    assert found.name == "table nvidia-h200.json"
    assert found.decode(4, 64, 2) == SMALL
    for other in (schedules_for("NVIDIA H100", tmp_path), schedules_for(None, tmp_path)):
        assert other.name == "rules"
        assert other.decode(4, 64, 2) == decode(4, 64)
    assert schedules_for(NAME, tmp_path / "nowhere").name == "rules"


def test_tables_that_come_with_the_package_are_sound():
    for path in FOLDER.glob("*.json"):
        ScheduleTable.load(path)


def changed(**changes):
    return {"entries": [{**contents(NAME, LINES)["entries"][0], **changes}]}


def other_schedule(**changes):
    return changed(schedule={**contents(NAME, LINES)["entries"][0]["schedule"], **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format is 2"),
        ({"note": "smoke run"}, "note is 'smoke run'"),
        ({"device": {"type": "cpu", "name": NAME}}, "device.type is 'cpu'"),
        ({"date": "yesterday"}, "date is 'yesterday'"),
        ({"commit": {"hash": None}}, "commit.dirty"),
        ({"entries": []}, "entries is"),
        ({"entries": 2 * contents(NAME, LINES)["entries"]}, "two entries of decode, tokens 32, max_rank 64"),
        (changed(kind="verify"), "entries.0.kind is 'verify'"),
        (changed(kind="prefill"), "tensor_cores is False in an entry of prefill"),
        (changed(tokens=0), "entries.0.tokens is 0"),
        (changed(tokens="8"), "entries.0.tokens is '8'"),
        (changed(itemsize=1), "entries.0.itemsize is 1"),
        (changed(us=0.0), "entries.0.us is 0.0"),
        (changed(us=float("nan")), "entries.0.us is nan"),
        (changed(why=1), "entries.0.why is 1"),
        (changed(schedule=[]), "object of a schedule's fields"),
        (changed(schedule={"tensor_cores": False}), "tile_tokens is missing"),
        (other_schedule(blocks=1), "blocks is no field of a schedule"),
        (other_schedule(warps=True), "warps is True; an integer"),
        (other_schedule(tensor_cores=0), "tensor_cores is 0; true or false"),
        (other_schedule(warps=3), "warps is 3; a power of two"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, changes, message):
    path = tmp_path / "nvidia-h200.json"
    path.write_text(json.dumps({**contents(NAME, LINES), **changes}), encoding="utf-8")
    with pytest.raises(ScheduleTableError, match=message) as error:
        ScheduleTable.load(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "nvidia-h200.json"
    with pytest.raises(ScheduleTableError, match="cannot be read"):
        ScheduleTable.load(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ScheduleTableError, match="no JSON"):
        schedules_for(NAME, tmp_path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ScheduleTableError, match="the file"):
        ScheduleTable.load(path)
    write_table(tmp_path, "NVIDIA H100", LINES).rename(path)
    with pytest.raises(ScheduleTableError, match=r"its file is nvidia-h100\.json"):
        ScheduleTable.load(path)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("max_rank", [1, 8, 16, 32, 64, 100, 256])
def test_rules_keep_to_what_tables_must(max_rank, itemsize):
    for tokens in (1, 8, 64, 256, 1024, 8192):
        for schedule in (decode(tokens, max_rank), prefill(tokens, max_rank, itemsize)):
            check_schedule(schedule, max_rank, itemsize)
            assert shared_bytes(schedule, itemsize) <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("schedule", "changes", "message"),
    [
        (decode(8, 64), {"block_k": 0}, "block_k is 0"),
        (decode(8, 64), {"block_n": 192}, "block_n is 192; a power of two"),
        (decode(8, 64), {"block_n": 4}, "a load needs 16 bytes"),
        (decode(8, 64), {"lanes": 5}, "lanes is 5; 4 take all"),
        (decode(8, 64), {"max_splits": 4}, "block_k times max_splits is 1024"),
        (decode(8, 64), {"max_splits": 65}, "max_splits is 65; at most 64"),
        (decode(8, 64), {"block_k": 1024}, "block_r and block_k make 16384 sums in 4 warps"),
        (prefill(256, 64), {"block_r": 8}, "block_r is 8; tensor cores need"),
        (prefill(256, 64), {"tile_tokens": 128}, "tile_tokens and block_n make"),
        (prefill(256, 64), {"stages": 6}, "stages is 6: 98304 bytes of shared memory"),
    ],
)
def test_a_schedule_that_would_not_run_is_refused(schedule, changes, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(replace(schedule, **changes), 64, 2)
