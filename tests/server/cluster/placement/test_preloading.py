"""Preloading: where adapters lie by burst tolerance, and the rates that decide it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.server.cluster.placement.preloading import MEMORY_SECONDS, ArrivalRates, burst_tolerance

RATES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 50).map(float), max_size=8)
PAGES = st.fixed_dictionaries({name: st.integers(1, 12) for name in "abcdefgh"})


def least(placed, rates, pages, room):
    """The lowest burst tolerance of an adapter that lies somewhere."""
    free = [count - sum(pages[name] for name in names) for count, names in zip(room, placed, strict=True)]
    there = {name for names in placed for name in names}
    return min(
        sum(left for left, names in zip(free, placed, strict=True) if name in names) / rates[name] for name in there
    )


@settings(max_examples=40)
@given(RATES, PAGES, st.lists(st.integers(0, 60), min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 0.9]))
def test_adapters_keep_to_their_share_of_the_pages_and_lie_once_at_a_replica(rates, pages, room, kv_share):
    placed = burst_tolerance(rates, pages, room, kv_share)
    for names, count in zip(placed, room, strict=True):
        assert len(set(names)) == len(names)
        assert sum(pages[name] for name in names) <= (1 - kv_share) * count
        assert all(rates[name] > 0 for name in names)


@settings(max_examples=40)
@given(RATES, st.integers(1, 4))
def test_every_adapter_lies_somewhere_where_there_is_room(rates, count):
    placed = burst_tolerance(rates, dict.fromkeys(rates, 1), [100] * count)
    assert {name for names in placed for name in names} == {name for name, rate in rates.items() if rate > 0}


def test_the_more_requests_the_more_replicas():
    placed = burst_tolerance({"a": 30.0, "b": 10.0, "c": 1.0}, {"a": 1, "b": 1, "c": 1}, [20] * 6)
    counts = [sum(name in names for names in placed) for name in "abc"]
    assert counts[0] == 6 and counts == sorted(counts, reverse=True) and counts[2] >= 1


def test_it_ends_where_one_more_replica_would_lower_the_least_tolerance():
    rates, pages, room = {"a": 4.0, "b": 4.0}, {"a": 10, "b": 10}, [30, 30, 30]
    placed = burst_tolerance(rates, pages, room, 0.0)
    everywhere = [["a", "b"]] * 3
    assert placed != everywhere
    assert least(placed, rates, pages, room) >= least(everywhere, rates, pages, room)


def test_an_adapter_that_fits_nowhere_stops_no_other():
    assert burst_tolerance({"big": 9.0, "a": 1.0}, {"big": 50, "a": 1}, [20, 20]) == [["a"], ["a"]]


def test_rates_forget():
    rates = ArrivalRates()
    for _ in range(100):
        rates.note("a", 0.0)
    rates.note("b", 0.0)
    now = rates.at(0.0)
    assert (now["a"], now["b"]) == (100 / MEMORY_SECONDS, 1 / MEMORY_SECONDS)
    later = rates.at(2 * MEMORY_SECONDS)
    assert set(later) == {"a"} and 0.13 < later["a"] / now["a"] < 0.14
