"""Laws of popularity, by the definitions of the papers, and the ranks of adapters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.perf.workload import WorkloadError, WorkloadSpec
from chorus.perf.workload.popularity import PowerLaw, Uniform, Zipf

from .traces_on_disk import adapters


def spec(popularity: dict, requests: int | None = 20_000, **fields: object) -> WorkloadSpec:
    fields = {"arrivals": {"process": "poisson", "rate": 100}, "lengths": {"kind": "alpaca"}, **fields}
    return WorkloadSpec.parse({"popularity": popularity, "requests": requests, **fields})


def counts(popularity: dict, requests: int = 20_000, **fields: object) -> Counter:
    return Counter(request.adapter for request in spec(popularity, requests, **fields))


def no_requests() -> int:
    raise AssertionError("the law does not depend on the number of requests")


def test_zipf_is_the_ratio_of_neighbours():
    weights = Zipf(kind="zipf", alpha=1.5).weights(12, no_requests)
    np.testing.assert_allclose(weights[:-1] / weights[1:], 1.5, rtol=1e-12)
    found = counts({"kind": "zipf", "alpha": 2.0}, 50_000, adapters={"count": 5})
    shares = [found[f"adapter-{i:05d}"] / 50_000 for i in range(5)]
    np.testing.assert_allclose(shares, np.array([16, 8, 4, 2, 1]) / 31, rtol=0.1)


@given(requests=st.integers(1, 5000), alpha=st.floats(1.1, 4))
def test_exact_zipf_deals_out_runs_of_powers(requests, alpha):
    lengths = Zipf(kind="zipf", alpha=alpha).counts(requests, None)
    assert lengths.sum() == requests
    assert (np.diff(lengths) <= 0).all() and (lengths > 0).all()
    powers = Counter(int(alpha**k + 1e-9) for k in range(len(lengths) - 1))
    # one run holds the rest; powers next to a whole number may fall on either side of it
    if all(abs(alpha**k - round(alpha**k)) > 1e-6 for k in range(1, len(lengths))):
        assert (powers - Counter(lengths.tolist())).total() == 0


def test_exact_zipf_of_a_hundred_by_hand():
    # 1.5^k: 1, 1.5, 2.25, 3.375, 5.06, 7.59, 11.39, 17.09, 25.63; 26 are left of 100 after the 17
    lengths = Zipf(kind="zipf", alpha=1.5).counts(100, None)
    assert lengths.tolist() == [28, 25, 17, 11, 7, 5, 3, 2, 1, 1]


def test_distinct_and_identical():
    assert max(counts({"kind": "distinct"}, 500).values()) == 1
    assert counts({"kind": "distinct"}, 500, adapters={"count": 50}) == {f"adapter-{i:05d}": 10 for i in range(50)}
    assert counts({"kind": "identical"}, 500) == {"adapter-00000": 500}


@pytest.mark.parametrize(("requests", "adapters"), [(1, 1), (2, 2), (4, 2), (5, 3), (100, 10), (101, 11)])
def test_uniform_has_the_root_of_the_requests(requests, adapters):
    assert len(Uniform(kind="uniform").weights(None, lambda: requests)) == adapters
    exact = Uniform(kind="uniform").counts(requests, None)
    assert exact.sum() == requests
    assert exact.max() - exact.min() <= 1


def test_uniform_counts_on_expected_requests():
    made = spec({"kind": "uniform"}, None, duration=100)
    assert len(Counter(request.adapter for request in made)) == 100


def test_power_law():
    weights = PowerLaw(kind="power_law", exponent=1.5).weights(8, no_requests)
    np.testing.assert_allclose(weights, np.arange(1, 9) ** -1.5)
    with pytest.raises(WorkloadError, match=r"set `adapters\.count`"):
        counts({"kind": "power_law"})


@given(count=st.integers(1, 20), exponent=st.floats(0, 3), requests=st.integers(1, 500))
def test_exact_shares_are_within_one(count, exponent, requests):
    law = PowerLaw(kind="power_law", exponent=exponent)
    found, weights = law.counts(requests, count), law.weights(count, no_requests)
    assert found.sum() == requests
    assert (np.abs(found - weights / weights.sum() * requests) < 1 + 1e-9).all()


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_exact_shares_are_dealt_out_in_random_order(kind):
    law = {"kind": kind, "exact": True}
    first, second = ([each.adapter for each in spec(law, 100, seed=seed)] for seed in (0, 1))
    laws = {"uniform": Uniform(kind="uniform"), "zipf": Zipf(kind="zipf")}
    want = laws[kind].counts(100, None).tolist()
    assert sorted(Counter(first).values(), reverse=True) == sorted(Counter(second).values(), reverse=True) == want
    assert first != second and first != sorted(map(str, first))


def test_trace_replay_ends(tmp_path):
    popularity = {"kind": "trace", "trace": adapters(tmp_path)}
    assert [request.adapter for request in spec(popularity)] == [None, "L2", "L1", "L2"]


def test_trace_of_names_refuses_a_count(tmp_path):
    with pytest.raises(WorkloadError, match=r"adapters\.count is 7"):
        counts({"kind": "trace", "trace": adapters(tmp_path)}, adapters={"count": 7})


def test_base_share():
    found = counts({"kind": "identical"}, adapters={"base_share": 0.3})
    assert found[None] / 20_000 == pytest.approx(0.3, rel=0.1)


def ranks(kind: dict | None, count: int | None, **fields: object) -> dict[str | None, int]:
    made = spec({"kind": "distinct"}, 4000, adapters={"count": count, "ranks": kind, **fields})
    found: dict = {}
    for request in made:
        assert found.setdefault(request.adapter, request.rank) == request.rank, "an adapter keeps its rank"
    return found


def test_fixed_and_unknown_ranks():
    assert set(ranks({"kind": "fixed", "rank": 64}, 10).values()) == {64}
    assert set(ranks(None, 10, base_share=0.5).items()) >= {(None, 0), ("adapter-00000", None)}


def test_chosen_ranks_have_their_weights():
    found = Counter(ranks({"kind": "choice", "ranks": [8, 16, 64], "weights": [1, 2, 1]}, None).values())
    assert found[16] / 4000 == pytest.approx(0.5, rel=0.1)
    assert found[8] / 4000 == pytest.approx(0.25, rel=0.15)
    assert found.keys() == {8, 16, 64}
