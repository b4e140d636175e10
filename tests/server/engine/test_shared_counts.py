"""Counts of several processes: a scrape of any has them all, and none falls when a process ends."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from prometheus_client import Gauge, generate_latest

from chorus.server.access.shared_bounds import RequestSlots
from chorus.server.engine.engine_view import EngineView
from chorus.server.engine.metrics import Metrics
from chorus.server.engine.request_metrics import Ended
from tests.server.conftest import FakeEngine


@pytest.fixture
def make(tmp_path, monkeypatch):
    """`make(seat)`: the metrics of a process; None for one that is alone."""

    def make(seat: int | None) -> Metrics:
        monkeypatch.setattr(RequestSlots, "take", lambda *_: seat)  # the system's lock is of a process
        engine = FakeEngine(["alice", "bob"])
        return Metrics(engine.stats, EngineView, "base", None if seat is None else tmp_path)

    return make


def answer(metrics: Metrics, model: str, tokens: int, seconds: float = 0.03) -> None:
    spent = metrics.accepted(model, "acme", 1, 5)
    metrics.generated(spent, tokens, seconds, first=True)
    metrics.ended(spent, model, "stop", Ended(seconds, 0.0, seconds, seconds, 5, 0, tokens, 16))


def counts(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render(generate_latest).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs if not re.search("_created|lora_requests_info", name)}


def test_any_process_tells_what_all_have_counted_as_one_would(make):
    one, other, alone = make(0), make(1), make(None)
    for metrics, model, tokens in ((one, "alice", 3), (other, "alice", 4), (other, "bob", 7)):
        answer(metrics, model, tokens)
        answer(alone, model, tokens)
    one.shared.publish()
    other.shared.publish()
    assert counts(one) == counts(other) == counts(alone)
    assert counts(one)['chorus_generated_tokens_total{model="alice"}'] == 7
    assert counts(one)['chorus_time_to_first_token_seconds_bucket{le="0.04"}'] == 3


def test_no_count_falls_when_a_process_ends_and_another_takes_its_seat(make):
    one, other = make(0), make(1)
    answer(one, "alice", 3)
    answer(other, "alice", 4)
    one.shared.publish()
    one = make(0)  # the first was killed
    assert counts(one)['chorus_generated_tokens_total{model="alice"}'] == 3, "the other has told nothing yet"
    other.shared.publish()
    answer(one, "alice", 10)
    one.shared.publish()
    assert counts(one)['chorus_generated_tokens_total{model="alice"}'] == 17
    assert counts(other) == counts(one)


def test_a_process_s_own_state_is_not_added_up(make):
    one, other = make(0), make(1)
    for metrics, value in ((one, 3), (other, 4)):
        Gauge("waiting", "at this process", registry=metrics.counted).set(value)
        metrics.shared.publish()
    assert counts(one)["waiting"] == 3 and counts(other)["waiting"] == 4
    assert counts(one)["chorus_steps_total"] == FakeEngine([]).stats().num_steps, "the engine's are of all anyway"


def test_a_model_that_is_gone_has_no_series_though_others_counted_it(make):
    one, other = make(0), make(1)
    answer(one, "alice", 3)
    answer(other, "alice", 4)
    one.shared.publish()
    other.shared.publish()
    one = make(0)
    one.forget_all_but(["bob"])
    assert not any('"alice"' in name for name in counts(one))
    one.forget_all_but(["alice"])
    assert counts(one)['chorus_generated_tokens_total{model="alice"}'] == 4, "what was forgotten stays so"
    assert counts(one)['chorus_generated_tokens_total{model="other"}'] == 3, "and nothing is lost from the sum"


def test_each_process_has_a_seat_of_its_own_and_gives_it_back_when_it_ends(tmp_path):
    code = (
        "import sys; from pathlib import Path; from prometheus_client import CollectorRegistry, Counter\n"
        "from chorus.server.engine.shared_counts import SharedCounts\n"
        "registry = CollectorRegistry(); Counter('n', 'n', registry=registry).inc()\n"
        "SharedCounts(registry, Path(sys.argv[1])).publish(); print('there', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]

    def begin() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "there\n"
        return process

    with begin() as first, begin() as second:
        assert sorted(file.name for file in tmp_path.glob("counts-*")) == ["counts-0", "counts-1"]
        first.kill()
        first.wait()
        with begin() as third:
            assert sorted(file.name for file in tmp_path.glob("counts-*")) == ["counts-0", "counts-1"]
            assert '"n_total", {}, 2.0' in (tmp_path / "counts-0").read_text()
            third.kill()
        second.kill()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"chorus_generated_tokens": [["x", {}, {}]]}'])
def test_a_damaged_file_of_counts_begins_anew_and_is_logged(make, tmp_path, caplog, text):
    one, other = make(0), make(1)
    answer(one, "alice", 3)
    answer(other, "alice", 4)
    for seat in (0, 1):
        (tmp_path / f"counts-{seat}").write_text(text)
    assert counts(one)['chorus_generated_tokens_total{model="alice"}'] == 3
    assert counts(make(0)) and "can't be read" in caplog.text
