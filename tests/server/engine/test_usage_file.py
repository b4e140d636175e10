"""The usage file, and `chorus usage`."""

from __future__ import annotations

import csv
import errno
import io
import json
import time
from datetime import UTC, datetime

import pytest

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


def test_what_no_disk_takes_is_bounded_and_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(usage_file, "MAX_UNWRITTEN", 1)
    file = UsageFile(tmp_path / "usage.csv")
    for tenant in ("acme", "beta", "acme"):
        file.note("alice", tenant, "stop", ENDED)
    file.flush()
    assert "usage of 1 requests is lost" in caplog.text
    assert len(file.path.read_text().splitlines()) == 2
