"""`--record`: a row for each request that ends, which `chorus plan` reads, without the content of requests."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from chorus.memory.adapters.store import UnknownAdapter
from chorus.perf.workload import WorkloadSpec
from chorus.perf.workload.trace import Csv
from chorus.server.cluster.catalog import done, failed
from chorus.server.engine import appended_csv
from chorus.server.engine import recorder as module
from chorus.server.engine.appended_csv import NotAppendable
from chorus.server.engine.engine_view import AdapterState
from chorus.server.engine.recorder import HEADER, Recorder
from chorus.server.settings import Settings
from chorus.server.start import launch
from chorus.server.start.checks import LaunchError


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.01)


def rows(path):
    return Csv(format="csv", path=path, sort=True).rows()


def ended(adapter=None, prompt=3, output=2, tenant="", arrival=5.0):
    """The recorded row of a request."""
    return SimpleNamespace(arrival_time=arrival, adapter_name=adapter, tenant=tenant), prompt, output


class Adapters:
    """Adapters of rank 8, but for one that is gone."""

    def __init__(self):
        self.asked = []

    def state(self, name):
        self.asked.append(name)
        if name == "gone":
            return failed(UnknownAdapter(name))
        return done(AdapterState(name, 1, SimpleNamespace(rank=8), "disk", 0, 0, pinned=False))


def test_requests_of_a_server_are_recorded_as_they_end(start, fake_engine, tmp_path):
    path = tmp_path / "trace.csv"
    live = start(fake_engine, settings={"record": path, "tenant_header": "x-team"})
    with ThreadPoolExecutor(2) as threads:
        list(
            threads.map(
                lambda team: live.client.post(
                    "/v1/completions",
                    json={"model": "alice", "prompt": "secret", "n": 2},
                    headers={"x-team": team},
                ),
                ("red", "blue"),
            )
        )
    live.post(model="base", prompt="words", max_tokens=2)
    live.post(model="nobody", prompt="abc")
    live.wait_until(lambda: len(path.read_text().splitlines()) == 6)
    found = rows(path)
    assert [(one.adapter, one.rank, one.prompt_tokens, one.output_tokens) for one in found] == [
        *[("alice", 4, 7, 7)] * 4,
        (None, 0, 6, 2),
    ]
    tenants = [one.tenant for one in found]
    assert len(set(tenants)) == 3
    text = path.read_text()
    assert not any(word in text for word in ("secret", "words", "red", "blue", "127.0.0.1"))
    assert path.stat().st_mode & 0o777 == 0o600
    spec = WorkloadSpec.parse({"trace": {"format": "csv", "path": str(path), "sort": True}})
    assert [request.prompt_tokens for request in spec] == [7, 7, 7, 7, 6]


def test_an_answer_that_a_client_leaves_is_recorded_with_what_it_had(start, fake_engine, tmp_path):
    path = tmp_path / "trace.csv"
    live = start(fake_engine, settings={"record": path})
    body = {"model": "base", "prompt": "a" * 400, "stream": True, "ignore_eos": True}
    fake_engine.step_seconds = 0.01
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
    live.wait_until(lambda: len(path.read_text().splitlines()) == 2, 20)
    (row,) = rows(path)
    assert row.prompt_tokens == 401 and row.output_tokens is not None and 1 <= row.output_tokens < 111


def test_a_trace_is_gone_on_with_and_ranks_are_asked_for_once(tmp_path):
    path, adapters = tmp_path / "trace.csv", Adapters()
    for tenant in ("one", "two"):
        recorder = Recorder(path)
        recorder.start(adapters)
        for adapter in ("a", "gone", None, "a"):
            recorder.note(*ended(adapter, output=0, tenant=tenant))
        recorder.stop()
    assert path.read_text().startswith(f"{HEADER}\n") and path.read_text().count("arrival") == 1
    found = rows(path)
    assert sorted({(one.adapter, one.rank, one.output_tokens) for one in found}, key=str) == [
        ("a", 8, 1),
        ("gone", None, 1),
        (None, 0, 1),
    ]
    assert len(found) == 8 and len({one.tenant for one in found}) == 2
    assert adapters.asked.count("a") == 2


def test_a_second_stop_closes_no_file_of_another(tmp_path):
    recorder = Recorder(tmp_path / "trace.csv")
    recorder.start(Adapters())
    recorder.stop()
    with (tmp_path / "other").open("wb") as other:  # it gets the descriptor that was closed
        recorder.stop()
        other.write(b"whole")
    assert (tmp_path / "other").read_bytes() == b"whole"


def test_a_file_of_something_else_is_refused_by_name_and_left_as_it_is(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("my notes\n")
    with pytest.raises(NotAppendable, match=r"--record .*notes\.csv: it exists and is not such a trace"):
        Recorder(path)
    with pytest.raises(LaunchError, match=r"notes\.csv: it exists and is not such a trace; name another file"):
        launch.build_app(Settings(record=path), lambda settings: pytest.fail("it is found before anything is loaded"))
    assert path.read_text() == "my notes\n"
    with pytest.raises(NotAppendable, match=r"nowhere/t\.csv: No such file or directory; name a file in an"):
        Recorder(tmp_path / "nowhere" / "t.csv")


def test_rows_that_a_full_disk_does_not_take_are_counted_and_none_is_cut_off(tmp_path, monkeypatch, caplog):
    path = tmp_path / "trace.csv"
    recorder = Recorder(path)
    write = appended_csv.os.write
    monkeypatch.setattr(appended_csv.os, "write", lambda file, data: write(file, data[:10]))
    with caplog.at_level(logging.WARNING):
        recorder.start(Adapters())
        recorder.note(*ended())
        recorder.stop()
    assert path.read_text() == f"{HEADER}\n"
    assert "1 requests are missing" in caplog.text and "No space left" in caplog.text


def test_rows_are_dropped_rather_than_kept_without_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    recorder = Recorder(tmp_path / "trace.csv")
    for _ in range(5):
        recorder.note(*ended())
    with caplog.at_level(logging.WARNING):
        recorder.start(Adapters())
        recorder.stop()
    assert len(rows(tmp_path / "trace.csv")) == 2 and "3 requests are missing" in caplog.text
