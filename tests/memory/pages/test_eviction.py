"""The one eviction order: dear, often used and small entries stay; once popular ones age; wanted ones go last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.pages.eviction import EvictionOrder, RestoreCosts


def drain(order):
    return [order.pop() for _ in range(len(order))]


def test_cheapest_per_page_goes_first():
    order = EvictionOrder()
    order.add("dear", 1, 5.0, 1)
    order.add("cheap", 1, 1.0, 1)
    order.add("large", 10, 20.0, 1)
    assert drain(order) == ["cheap", "large", "dear"]


def test_uses_weigh_as_cost_does():
    order = EvictionOrder()
    order.add("often", 1, 1.0, 9)
    order.add("dear", 1, 4.0, 1)
    order.add("once", 1, 1.0, 1)
    assert drain(order) == ["once", "dear", "often"]


def test_equals_go_in_the_order_they_came():
    order = EvictionOrder()
    for item in "abc":
        order.add(item, 2, 1.0, 1)
    order.discard("a")
    order.add("a", 2, 1.0, 1)
    assert drain(order) == ["b", "c", "a"]


def test_the_deeper_goes_first_among_equals():
    order = EvictionOrder()
    for depth in (1, 3, 2):
        order.add(depth, 1, 1.0, 1, depth=depth)
    assert drain(order) == [3, 2, 1]


def test_wanted_goes_last_whatever_it_costs():
    order = EvictionOrder()
    order.add("wanted", 1, 0.0, 1, wanted=True)
    order.add("dear", 1, 1e9, 1000)
    assert drain(order) == ["dear", "wanted"]


def test_least_recently_used_asks_for_nothing_else():
    order = EvictionOrder(lru=True)
    order.add("wanted", 1, 9.0, 9, wanted=True)
    order.add("deep", 1, 1.0, 1, depth=3)
    order.add("cheap", 1, 0.0, 1)
    order.add("deep", 1, 1.0, 1, depth=3)
    assert drain(order) == ["wanted", "cheap", "deep"]


def test_what_is_added_again_has_its_new_priority():
    order = EvictionOrder()
    order.add("a", 1, 1.0, 1, wanted=True)
    order.add("b", 1, 2.0, 1)
    order.add("a", 1, 1.0, 1)
    assert len(order) == 2
    assert drain(order) == ["a", "b"]


def test_what_was_popular_ages():
    """Each eviction raises the clock, so newcomers overtake entries that are never used again (GreedyDual)."""
    order = EvictionOrder()
    order.add("once popular", 1, 1.0, 5)
    evicted = []
    for index in range(10):
        order.add(index, 1, 1.0, 1)
        evicted.append(order.pop())
    assert evicted[:6] == [0, 1, 2, 3, "once popular", 4], "it stays for as many evictions as it had more uses"


def test_evicting_what_is_wanted_does_not_age_the_others():
    order = EvictionOrder()
    order.add("wanted", 1, 1e9, 1, wanted=True)
    assert order.pop() == "wanted"
    order.add("a", 1, 5.0, 1)
    order.add("b", 1, 1.0, 1)
    order.pop()
    order.add("c", 1, 3.0, 1)
    assert drain(order) == ["c", "a"], "the clock is at b's priority, 1"


def test_discarded_items_never_come():
    order = EvictionOrder()
    order.add("a", 1, 1.0, 1)
    order.add("b", 1, 2.0, 1)
    order.discard("a")
    order.discard("nobody")
    assert "a" not in order
    assert "b" in order
    assert drain(order) == ["b"]
    with pytest.raises(IndexError):
        order.pop()


def test_stale_entries_do_not_pile_up():
    order = EvictionOrder()
    for index in range(10_000):
        order.add(index % 10, 1, 1.0, 1)
    assert len(order) == 10
    assert len(order._heap) < 200  # noqa: SLF001 - memory is all that they would cost


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 4), st.integers(0, 9), st.booleans()),
            st.tuples(st.just("discard"), st.integers(0, 5)),
            st.tuples(st.just("pop")),
        ),
        max_size=60,
    )
)
def test_equals_a_plain_model(operations):
    """GreedyDual-Size-Frequency by its definition, over a dictionary."""
    order, model, clock = EvictionOrder(), {}, 0.0
    for number, (name, *arguments) in enumerate(operations):
        if name == "add":
            item, pages, cost, wanted = arguments
            order.add(item, pages, cost, 2, wanted=wanted)
            model[item] = (wanted, clock + 2 * cost / pages, number)
        elif name == "discard":
            order.discard(arguments[0])
            model.pop(arguments[0], None)
        elif model:
            item = min(model, key=model.get)
            wanted, priority, _ = model.pop(item)
            clock = clock if wanted else max(clock, priority)
            assert order.pop() == item
        assert len(order) == len(model)


def test_measured_costs_are_smoothed():
    costs = RestoreCosts(prefix_page=1.0)
    costs.observe("prefix_page", 2.0)
    assert costs.prefix_page == pytest.approx(1.2)
    for _ in range(60):
        costs.observe("prefix_page", 2.0)
    assert costs.prefix_page == pytest.approx(2.0, rel=1e-4)


def test_a_cost_that_forbids_its_own_measuring_falls():
    """One slow read must not end all reads: nothing else would ever measure them again."""
    costs = RestoreCosts(disk_prefix_page=1.0)
    for _ in range(30):
        costs.doubt("disk_prefix_page")
    assert costs.disk_prefix_page < 5 * RestoreCosts().disk_prefix_page


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.booleans())))
def test_what_comes_next_is_named_in_its_order_and_stays(acts):
    order = EvictionOrder()
    for item, pages, uses, wanted, goes in acts:
        if goes:
            order.discard(item)
        else:
            order.add(item, pages, 1.0, uses, wanted=wanted, depth=item % 2)
    named = list(order.upcoming())
    assert len(named) == len(order)
    assert named == drain(order)
