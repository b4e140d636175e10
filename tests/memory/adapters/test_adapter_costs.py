"""What adapters cost the engine, by name."""

from types import SimpleNamespace

import pytest

from chorus.memory.adapters.adapter_costs import LOAD_BUCKETS, REST, AdapterCosts, added, merged


class Adapter:
    def __init__(self, name, sources=()):
        self.name, self.sources = name, sources


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def costs(clock):
    return AdapterCosts(lambda: clock.now)


def by_name(costs):
    return {one.name: one for one in costs.so_far()}


def test_page_seconds_are_pages_times_the_seconds_that_they_are_held(costs, clock):
    one = Adapter("alice")
    costs.note_pages(one, 4)
    clock.now += 2
    assert by_name(costs)["alice"].page_seconds == 8, "also while it is resident"
    costs.note_pages(one, 0)
    clock.now += 100
    assert by_name(costs)["alice"].page_seconds == 8


def test_versions_of_a_name_are_one_cost(costs, clock):
    old, new = Adapter("alice"), Adapter("alice")
    costs.note_pages(old, 4)
    costs.note_pages(new, 1)
    clock.now += 1
    costs.note_pages(old, 0)
    clock.now += 1
    assert by_name(costs)["alice"].page_seconds == 4 + 2


def test_loads_are_a_histogram(costs):
    for seconds in (0.0005, 0.05, 99.0):
        costs.note_load(Adapter("alice"), seconds)
    found = by_name(costs)["alice"]
    assert found.load_seconds == pytest.approx(99.0505)
    assert [bound for bound, count in zip((*LOAD_BUCKETS, "more"), found.loads, strict=True) if count] == [
        0.001,
        0.05,
        "more",
    ]


def test_what_a_removed_name_cost_stays_in_the_sum(costs, clock):
    one = Adapter("alice")
    costs.note_load(one, 0.5)
    costs.note_pages(one, 3)
    clock.now += 1
    costs.forget("alice")
    clock.now += 1
    costs.note_pages(one, 0)
    found = by_name(costs)
    assert "alice" not in found
    assert (found[REST].page_seconds, found[REST].load_seconds, sum(found[REST].loads)) == (6, 0.5, 1)


def test_compositions_are_counted_together(costs):
    costs.note_load(Adapter("a*0.7+b*0.5", sources=(1, 2)), 0.5)
    assert list(by_name(costs)) == [REST]


def test_merging_keeps_the_sum(costs):
    for index, name in enumerate("abc"):
        for _ in range(index + 1):
            costs.note_load(Adapter(name), 0.5)
    found = merged(costs.so_far(), 2)
    assert [(one.name, sum(one.loads)) for one in found] == [("c", 3), ("b", 2), (REST, 1)]
    assert [sum(one.loads) for one in added([*found, *found])] == [6, 4, 2]
