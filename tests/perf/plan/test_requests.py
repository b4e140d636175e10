"""Requests of a plan: those read from a trace, and those that a similar period may bring."""

from __future__ import annotations

import pytest

from chorus.perf.plan.requests import PlanError, load_requests
from chorus.perf.workload.fields import WorkloadError
from chorus.server.engine.recorder import HEADER


def test_rows_are_sorted_and_begin_at_0(trace):
    requests = load_requests(trace)
    arrivals = [one.arrival for one in requests.items]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0.0 and requests.span == pytest.approx(29.5)
    assert [one.id for one in requests.items] == list(range(60))
    assert requests.ranks == {"a": 8, "b": 16, "c": 64}
    assert {(one.adapter, one.rank) for one in requests.items} == {(None, 0), ("a", 8), ("b", 16), ("c", 64)}


def test_a_draw_has_about_as_many_requests_with_the_same_course(trace):
    requests = load_requests(trace)
    assert requests.resampled(0) is requests
    draws = [requests.resampled(seed) for seed in range(1, 30)]
    counts = [len(one.items) for one in draws]
    assert 50 < sum(counts) / len(counts) < 70 and len(set(counts)) > 5
    for draw in draws:
        arrivals = [one.arrival for one in draw.items]
        assert arrivals == sorted(arrivals) and arrivals[-1] <= requests.span
        assert [one.id for one in draw.items] == list(range(len(arrivals)))
    assert 180 < len(requests.resampled(0, 4.0).items) < 300
    assert requests.resampled(3).items == requests.resampled(3).items != requests.resampled(4).items


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}\n")
    with pytest.raises(WorkloadError, match=r"trace\.csv: the trace has no rows"):
        load_requests(path)
    path = tmp_path / "other.csv"
    path.write_text("arrival,prompt_tokens\n1,2\n")
    with pytest.raises(WorkloadError, match=r"--trace: .*has no output_tokens"):
        load_requests(path)
    path = tmp_path / "ranks.csv"
    path.write_text(f"{HEADER}\n1,a,,10,10,\n")
    with pytest.raises(PlanError, match=r"rank of adapter 'a' is empty; fill the column rank, or give --rank N"):
        load_requests(path)
    assert load_requests(path, 16).ranks == {"a": 16}
