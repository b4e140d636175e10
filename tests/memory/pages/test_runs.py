"""Placing runs of consecutive pages, against trying every place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.pages import runs
from chorus.memory.pages.runs import place_runs

COSTS = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.5, np.inf]), min_size=1, max_size=24)


def windows(costs, size):
    return [range(first, first + size) for first in range(len(costs) - size + 1)]


@given(costs=COSTS, size=st.integers(1, 8))
def test_one_run_lies_where_it_costs_least_and_last(costs, size):
    prices = [sum(costs[page] for page in run) for run in windows(costs, size)]
    runs = place_runs([size], np.array(costs))
    if not prices or min(prices) == np.inf:
        assert runs is None
    else:
        first = max(index for index, price in enumerate(prices) if price == min(prices))
        assert runs == [range(first, first + size)]


@given(costs=COSTS, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_runs_are_disjoint_and_can_all_be_had(costs, sizes):
    before = np.array(costs)
    runs = place_runs(sizes, before)
    assert np.array_equal(before, costs)
    if runs is not None:
        pages = [page for run in runs for page in run]
        assert [len(run) for run in runs] == sizes
        assert len(set(pages)) == len(pages)
        assert all(costs[page] < np.inf for page in pages)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), free=st.integers(0, 10))
def test_runs_that_fill_what_is_free_are_found(sizes, free):
    """They lie close together at the end, and leave the beginning in one piece."""
    runs = place_runs(sizes, np.zeros(sum(sizes) + free))
    assert runs is not None
    assert {page for run in runs for page in run} == set(range(free, free + sum(sizes)))


def test_many_runs_of_one_size_are_priced_once(monkeypatch):
    """To sum all pages up for each run once took longer than a step."""
    priced = []
    totals = runs._totals  # noqa: SLF001
    monkeypatch.setattr(runs, "_totals", lambda costs, size: priced.append(size) or totals(costs, size))
    found = runs.place_runs([30] * 20 + [7] * 20, np.zeros(1000))
    assert priced == [30, 7]
    assert len({page for run in found for page in run}) == 20 * 37
