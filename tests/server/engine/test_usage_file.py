"""The usage file, and `chorus usage`."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import time
from datetime import UTC, datetime

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.cli.command import main
from chorus.server.engine import usage_file
from chorus.server.engine.appended_csv import AppendedCsv, NotAppendable
from chorus.server.engine.request_metrics import Ended
from chorus.server.engine.usage_file import HEADER, UsageFile

ENDED = Ended(3.0, 1.0, 1.5, 2.5, 5, 2, 3, 16, page_seconds=8.0)


def read(capsys, *arguments):
    assert main(["usage", *map(str, arguments)]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_a_server_writes_what_its_clients_used(start, fake_engine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(usage_file, "WRITE_SECONDS", 0.05)
    path, keys = tmp_path / "usage.csv", tmp_path / "keys"
    keys.write_text("sk-acme1 acme\nsk-beta1 beta\n")
    live = start(fake_engine, settings={"usage_file": path, "api_key_file": keys})
    told = {}
    for key, model in (("acme", "alice"), ("acme", "alice"), ("beta", "base")):
        headers = {"authorization": f"Bearer sk-{key}1"}
        body = {"model": model, "prompt": "abc", "n": 2}
        used = live.client.post("/v1/completions", json=body, headers=headers).json()["usage"]
        sums = told.setdefault((key, model), [0, 0])
        sums[0] += used["prompt_tokens"]
        sums[1] += used["completion_tokens"]
    live.wait_until(lambda: sum(int(row["requests"]) for row in read(capsys, path)) == 6)
    rows = read(capsys, path)
    assert {
        (row["tenant"], row["model"]): [int(row["prompt_tokens"]), int(row["generated_tokens"])] for row in rows
    } == told
    assert [int(row["requests"]) for row in rows] == [4, 2]
    assert [row["tenant"] for row in read(capsys, path, "--by", "tenant")] == ["acme", "beta"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("end", ["stop", "left", "length"])
def test_an_answer_that_ends_early_pays_for_its_pages(start, subject, tmp_path, capsys, monkeypatch, end):
    """The client's stop string, which the engine does not look for, and a client that leaves, in a prompt's block."""
    monkeypatch.setattr(usage_file, "WRITE_SECONDS", 0.05)
    config = EngineConfig(model=subject("gqa").model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    live = start(Engine.from_config(config), settings={"usage_file": tmp_path / "usage.csv"})
    body = {"model": "base", "prompt": [5, 9, 30], "ignore_eos": True, "max_tokens": 2, "temperature": 0}
    first = live.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    live.wait_until(lambda: len(read(capsys, tmp_path / "usage.csv")) == 1)
    (before,) = read(capsys, tmp_path / "usage.csv")
    if end == "left":
        with live.client.stream("POST", "/v1/completions", json=body | {"max_tokens": 200, "stream": True}) as told:
            next(told.iter_lines())
    else:
        ends = {"max_tokens": 200, "stop": [first[0]]} if end == "stop" else {}
        told = live.client.post("/v1/completions", json=body | ends).json()
        assert told["choices"][0]["finish_reason"] == end
    live.wait_until(lambda: read(capsys, tmp_path / "usage.csv")[0]["requests"] == "2")
    (after,) = read(capsys, tmp_path / "usage.csv")
    assert float(after["page_seconds"]) > float(before["page_seconds"]) > 0


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "usage.csv"
    rows = [
        (datetime(2026, 10, 31, 23, 59, tzinfo=UTC), "acme", "alice", 1, 0, 10, 4, 3, 8.5, 0.5),
        (datetime(2026, 11, 1, tzinfo=UTC), "acme", "alice", 2, 1, 20, 0, 6, 1.25, 0.25),
        (datetime(2026, 11, 2, tzinfo=UTC), "beta", 'with "quotes", and commas', 1, 0, 5, 0, 1, 0.0, 0.0),
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([int(when.timestamp()), *rest] for when, *rest in rows)
    path.write_text(f"{HEADER}\n{text.getvalue()}17")
    return path


def test_a_time_begins_and_ends_the_bill(written, capsys):
    november = read(capsys, written, "--since", "2026-11-01", "--by", "model")
    assert [(row["model"], row["requests"]) for row in november] == [("alice", "2"), ('with "quotes", and commas', "1")]
    (first,) = read(capsys, written, "--until", "2026-11-01T01:00+01:00")
    assert first["page_seconds"] == "8.5" and first["cached_tokens"] == "4"
    assert read(capsys, written, "--since", "2026-11-03") == []
    assert read(capsys, written, "--since", "1h") == []


def test_the_bill_as_json(written, capsys):
    assert main(["usage", str(written), "--format", "json", "--by", "tenant"]) == 0
    out, err = capsys.readouterr()
    acme, beta = json.loads(out)
    assert (acme["tenant"], acme["requests"], acme["errors"], acme["page_seconds"]) == ("acme", 3, 1, 9.75)
    assert beta["prompt_tokens"] == 5 and "1 lines can't be read" in err


@pytest.mark.parametrize("text", ["", "arrival,adapter\n1,2\n"])
def test_another_file_is_refused(tmp_path, capsys, text):
    (tmp_path / "other.csv").write_text(text)
    assert main(["usage", str(tmp_path / "other.csv")]) == 2
    assert "not a usage file" in capsys.readouterr().err
    assert main(["usage", str(tmp_path / "none.csv")]) == 2
    if text:
        with pytest.raises(NotAppendable, match=r"--usage-file .* it exists and is not such a usage file"):
            UsageFile(tmp_path / "other.csv")


def test_a_wrong_time_names_the_right_ones(written, capsys):
    assert main(["usage", str(written), "--since", "yesterday"]) == 2
    assert "2026-11-01T12:30+01:00, 24h, 30d or 4w" in capsys.readouterr().err


@pytest.mark.parametrize("until", ["2026-11-01", "2026-12-01"])
def test_a_time_that_ends_before_it_begins_is_refused(written, capsys, until):
    assert main(["usage", str(written), "--since", "2026-12-01", "--until", until]) == 2
    assert "--until" in (told := capsys.readouterr().err) and "--since" in told


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_full_disk_refuses_is_written_later(tmp_path, monkeypatch, caplog):
    file = UsageFile(tmp_path / "usage.csv")
    file.note("alice", "acme", "stop", ENDED)
    with monkeypatch.context() as m:
        m.setattr(AppendedCsv, "append", full)
        file.flush()
    assert "kept and written later" in caplog.text
    file.note("alice", "acme", "error", ENDED)
    file.flush()
    ((when, *rest),) = csv.reader(file.path.read_text().splitlines()[1:])
    assert rest[:6] == ["acme", "alice", "2", "1", "10", "4"] and abs(time.time() - float(when)) < 60


def test_compositions_with_other_scales_share_a_row(tmp_path):
    """A client may choose scales without end, and each set of them had a row."""
    file = UsageFile(tmp_path / "usage.csv")
    for model in ("a*0.25+b*0.5", "a*0.125+b*0.75", "b*2", "b*3+a*0", "b", "x*y", "a*9e9+b*1"):
        file.note(model, "acme", "stop", ENDED)
    file.flush()
    rows = [row[2:4] for row in csv.reader(file.path.read_text().splitlines()[1:])]
    assert rows == [["a*1+b*1", "2"], ["b", "3"], ["x*y", "1"], ["a*9e9+b*1", "1"]]


def test_what_no_disk_takes_is_bounded_and_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(usage_file, "MAX_UNWRITTEN", 1)
    file = UsageFile(tmp_path / "usage.csv")
    for tenant in ("acme", "beta", "acme"):
        file.note("alice", tenant, "stop", ENDED)
    file.flush()
    assert "usage of 1 requests is lost" in caplog.text
    assert len(file.path.read_text().splitlines()) == 2


def noted(file, name="alice"):
    """The rows that `chorus usage` is to find: one more request of this model."""
    file.note(name, "acme", "stop", ENDED)
    file.flush()


def counted(capsys, *paths):
    """Requests by model, and warnings."""
    assert main(["usage", *map(str, paths), "--by", "model"]) == 0
    out, err = capsys.readouterr()
    return {row["model"]: int(row["requests"]) for row in csv.DictReader(io.StringIO(out))}, err


def test_rows_go_to_a_new_file_after_the_old_one_was_moved_away(tmp_path, capsys):
    path, old = tmp_path / "usage.csv", tmp_path / "usage.csv.1"
    files = [UsageFile(path), UsageFile(path)]  # of two API servers
    for file in files:
        noted(file, "before")
    path.rename(old)
    for file in files:
        noted(file, "after")
    assert counted(capsys, old) == ({"before": 2}, "")
    assert counted(capsys, path) == ({"after": 2}, "")
    assert path.stat().st_mode & 0o777 == 0o600
    noted(UsageFile(path), "after")
    compressed = tmp_path / "usage.csv.1.gz"
    compressed.write_bytes(gzip.compress(old.read_bytes()))
    assert counted(capsys, path, compressed) == ({"before": 2, "after": 3}, "")


@pytest.mark.parametrize("is_made", [False, True])
def test_a_file_that_was_emptied_or_made_anew_begins_with_the_header(tmp_path, capsys, is_made):
    path = tmp_path / "usage.csv"
    file = UsageFile(path)
    noted(file, "before")
    if is_made:
        path.rename(tmp_path / "old")
        path.touch()
    else:
        path.write_text("")
    noted(file)
    assert counted(capsys, path) == ({"alice": 1}, "")
    noted(UsageFile(path))  # a restart
    assert counted(capsys, path) == ({"alice": 2}, "")


def test_rows_wait_while_no_file_can_be_made(tmp_path, capsys):
    path = tmp_path / "logs" / "usage.csv"
    path.parent.mkdir()
    file, other = UsageFile(path), UsageFile(path)
    path.parent.rename(tmp_path / "gone")
    for one in (file, other):  # neither leaves the old file locked
        noted(one)
    path.parent.mkdir()
    for one in (other, file):
        noted(one)
    assert counted(capsys, path) == ({"alice": 4}, "")


def test_rows_wait_while_another_file_has_the_name(tmp_path, capsys, caplog):
    path = tmp_path / "usage.csv"
    file = UsageFile(path)
    path.unlink()
    path.write_text("my notes\n")
    noted(file)
    assert path.read_text() == "my notes\n" and "is not such a usage file" in caplog.text
    path.unlink()
    noted(file)
    assert counted(capsys, path) == ({"alice": 2}, "")


@pytest.mark.parametrize("cut", ["17", '1796040452,acme,"quoted, and cu', "1796040452,a\xc3"])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_cut_line_spoils_no_other_row(tmp_path, capsys, cut, is_open):
    path = tmp_path / "usage.csv"
    file = UsageFile(path)
    noted(file)
    with path.open("ab") as other:
        other.write(cut.encode("latin-1"))
    for _ in range(2):
        noted(file if is_open else UsageFile(path), 'with "quotes", and commas')
    found, told = counted(capsys, path)
    assert found == {"alice": 1, 'with "quotes", and commas': 2} and "1 lines can't be read" in told


def test_a_cut_header_is_completed(tmp_path, capsys):
    path = tmp_path / "usage.csv"
    path.write_text(HEADER[:20])
    noted(UsageFile(path))
    assert counted(capsys, path) == ({"alice": 1}, "")


@pytest.mark.parametrize(
    "data",
    [gzip.compress(b"x" * 999)[:-9], b"\x1f\x8b and no more", gzip.compress(b"\xff\n")],
    ids=["cut", "wrong", "not text"],
)
def test_a_broken_archive_is_named(tmp_path, capsys, written, data):
    (tmp_path / "usage.csv.1.gz").write_bytes(data)
    assert main(["usage", str(written), str(tmp_path / "usage.csv.1.gz")]) == 2
    assert "usage.csv.1.gz: " in capsys.readouterr().err
