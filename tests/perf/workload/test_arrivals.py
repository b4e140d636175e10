"""Arrival times: rates and burstiness, in order, the same again, and a longer workload begins like a shorter one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.perf.workload import WorkloadSpec
from chorus.perf.workload.arrivals import LinearRate, integral, seconds

from .traces_on_disk import azure_llm

RISE_AND_FALL = {"curve": "linear", "points": [[0, 1], [1800, 39], [3600, 1]]}


def spec(arrivals: dict, **fields: object) -> WorkloadSpec:
    fields = {"popularity": {"kind": "identical"}, "lengths": {"kind": "alpaca"}, **fields}
    return WorkloadSpec.parse({"arrivals": arrivals, **fields})


def times(arrivals: dict, **fields: object) -> np.ndarray:
    return np.array([request.arrival for request in spec(arrivals, **fields)])


def cv(gaps: np.ndarray) -> float:
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize(
    ("arrivals", "want"),
    [({"process": "poisson"}, 1.0), ({"process": "constant"}, 0.0)],
)
def test_rate_and_burstiness(arrivals, want):
    gaps = np.diff(times({"rate": 50, **arrivals}, requests=40_000))
    assert 1 / gaps.mean() == pytest.approx(50, rel=0.1)
    assert cv(gaps) == pytest.approx(want, rel=0.1, abs=1e-6)


def test_constant_gaps():
    assert times({"process": "constant", "rate": 4}, duration=1.1).tolist() == [0.25, 0.5, 0.75, 1.0]


def test_rise_and_fall_hour():
    found = times({"process": "poisson", "rate": RISE_AND_FALL}, duration=3600)
    assert len(found) == pytest.approx(20 * 3600, rel=0.05)
    counts, _ = np.histogram(found, bins=6, range=(0, 3600))
    want = [(1 + 13.67) / 2, (13.67 + 26.33) / 2, (26.33 + 39) / 2]
    np.testing.assert_allclose(counts / 600, want + want[::-1], rtol=0.1)


def test_expected_requests():
    assert spec({"process": "poisson", "rate": 3}, duration=100).expected == 300
    assert spec({"process": "poisson", "rate": RISE_AND_FALL}, duration=3600).expected == 72_000


@given(
    points=st.lists(st.tuples(st.integers(0, 1000), st.just(0) | st.floats(0.01, 50)), min_size=1, max_size=6),
    due=st.lists(st.floats(1e-3, 2000), min_size=1, max_size=30),
)
def test_clock_inverts_the_integral(points, due):
    points = sorted(points)
    rate = LinearRate.model_construct(points=points)
    found = seconds(list(rate.pieces()), np.array(sorted(due)), math.inf)
    assert (np.diff(found) >= 0).all()
    for second, want in zip(found, sorted(due), strict=False):
        assert integral(rate.pieces(), float(second)) == pytest.approx(want, rel=1e-6, abs=1e-6)
    if points[-1][1] > 0:
        assert len(found) == len(due)


PROCESSES = st.one_of(
    st.just({"process": "poisson"}),
    st.just({"process": "constant"}),
)
RATES = st.one_of(
    st.floats(1, 500),
    st.builds(
        lambda rates: {"curve": "linear", "points": [[2.0 * i, rate] for i, rate in enumerate(rates)]},
        st.lists(st.floats(0.5, 300), min_size=1, max_size=5),
    ),
)


@pytest.mark.wide
@given(process=PROCESSES, rate=RATES, seed=st.integers(0, 2**32), short=st.floats(0.5, 10))
def test_ordered_restartable_and_prefix_of_longer(process, rate, seed, short):
    arrivals = {**process, "rate": rate}
    long = spec(arrivals, duration=20, seed=seed)
    requests = list(long)
    assert requests == list(long)
    assert [request.id for request in requests] == list(range(len(requests)))
    assert all(a.arrival <= b.arrival for a, b in itertools.pairwise(requests))
    assert all(0 <= request.arrival < 20 for request in requests)
    shorter = list(spec(arrivals, duration=short, seed=seed))
    assert shorter == [request for request in requests if request.arrival < short]
    few = len(requests) // 2 + 1
    assert list(spec(arrivals, duration=20, requests=few, seed=seed)) == requests[:few]


def test_replay(tmp_path):
    trace = azure_llm(tmp_path)
    assert times({"process": "replay", "trace": trace}) == pytest.approx([0, 0.75, 3.7500001])
    assert times({"process": "replay", "trace": trace}, duration=3).tolist() == [0, 0.75]
