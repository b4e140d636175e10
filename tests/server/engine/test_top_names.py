"""Series of the names with the most traffic, and one for all others."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chorus.server.engine.top_names import CHALLENGE, HALF_LIFE_SECONDS, OTHER, Split, TopNames


def test_all_have_series_while_there_are_few():
    names = TopNames(2, always=["base"])
    names.choose({"base": 0, "a": 1, "b": 1})
    assert names.shown == {"base", "a", "b"}


def test_the_ones_with_most_traffic_have_them():
    names = TopNames(2)
    names.choose({"a": 5, "b": 1, "c": 9, OTHER: 99})
    assert names.shown == {"a", "c"}


def test_another_takes_a_series_only_with_much_more_traffic():
    names = TopNames(1, clock=lambda: 0.0)
    names.choose({"a": 10})
    names.choose({"a": 10, "b": CHALLENGE * 10})
    assert names.shown == {"a"}
    names.choose({"a": 10, "b": CHALLENGE * 10 + 1})
    assert names.shown == {"b"}


def test_traffic_of_long_ago_counts_little():
    time = SimpleNamespace(now=0.0)
    names = TopNames(1, clock=lambda: time.now)
    names.choose({"a": 1000})
    time.now = 20 * HALF_LIFE_SECONDS
    names.choose({"a": 1000, "b": 1})
    assert names.shown == {"b"}


def test_a_name_that_is_gone_frees_its_series():
    names = TopNames(1)
    names.choose({"a": 10})
    names.choose({"b": 1})
    assert names.shown == {"b"}
    names = TopNames(1)
    names.fill(["c", "d"])
    assert names.shown == {"c"}


steps = st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 100), max_size=6), min_size=1, max_size=12)


@given(steps, st.integers(0, 3))
def test_series_add_up_to_all_and_none_falls_while_it_is_there(steps, most):
    names, counts, before = TopNames(most), {}, {}
    split = Split(names)
    for step in steps:
        for name, more in step.items():
            counts[name] = counts.get(name, np.zeros(2)) + np.array([more, 1])
        total = sum(counts.values(), np.zeros(2))
        names.choose({name: row[0] for name, row in counts.items()})
        series = split.of(dict(counts), total)
        assert len(series) <= most + 1
        assert sum(series.values(), np.zeros(2)).tolist() == total.tolist()
        for name, row in series.items():
            assert (row >= before.get(name, np.zeros(2))).all(), f"{name} fell"
        before = {**({OTHER: before[OTHER]} if OTHER in before else {}), **series}
