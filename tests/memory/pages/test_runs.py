"""Placing runs of consecutive pages, against trying every place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.pages import runs
from chorus.memory.pages.runs import BLOCKED, place_runs

COSTS = st.lists(st.sampled_from([0, 0, 1, BLOCKED]), min_size=1, max_size=24)


def windows(costs, size):
    return [range(first, first + size) for first in range(len(costs) - size + 1)]


@given(costs=COSTS, size=st.integers(1, 8))
def test_one_run_lies_where_it_costs_least_and_last(costs, size):
    prices = [sum(costs[page] for page in run) for run in windows(costs, size)]
    runs = place_runs([size], np.array(costs, np.uint32))
    if not prices or min(prices) >= BLOCKED:
        assert runs is None
    else:
        first = max(index for index, price in enumerate(prices) if price == min(prices))
        assert runs == [range(first, first + size)]


@given(costs=COSTS, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_runs_are_disjoint_and_can_all_be_had(costs, sizes):
    before = np.array(costs, np.uint32)
    runs = place_runs(sizes, before)
    assert np.array_equal(before, costs)
    if runs is not None:
        pages = [page for run in runs for page in run]
        assert [len(run) for run in runs] == sizes
        assert len(set(pages)) == len(pages)
        assert all(costs[page] < BLOCKED for page in pages)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), free=st.integers(0, 10))
def test_runs_that_fill_what_is_free_are_found(sizes, free):
    """They lie close together at the end, and leave the beginning in one piece."""
    runs = place_runs(sizes, np.zeros(sum(sizes) + free, np.uint32))
    assert runs is not None
    assert {page for run in runs for page in run} == set(range(free, free + sum(sizes)))


@given(
    costs=st.lists(st.sampled_from([0, 0, 0, 1, 1, BLOCKED]), min_size=1, max_size=80),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_each_run_lies_where_it_costs_least_beside_those_placed_before(costs, sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_WIDTH", 4)
        found = place_runs(sizes, np.array(costs, np.uint32))
    left, want = list(costs), [range(0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        prices = [(sum(left[page] for page in run), -run.start, run) for run in windows(left, sizes[index])]
        price, _, want[index] = min(prices, default=(BLOCKED, 0, range(0)))
        if price >= BLOCKED:
            assert found is None
            return
        for page in want[index]:
            left[page] = BLOCKED
    assert found == want


def test_many_runs_of_one_size_are_priced_once(monkeypatch):
    """To look at all pages for each run took longer than a step."""
    priced = []

    class Counted(runs._Runs):  # noqa: SLF001
        def open(self, size, placed):
            priced.append(size)
            return super().open(size, placed)

    monkeypatch.setattr(runs, "_Runs", Counted)
    found = runs.place_runs([30] * 20 + [7] * 20, np.zeros(1000, np.uint32))
    assert priced == [30, 7] and found is not None
    assert len({page for run in found for page in run}) == 20 * 37
