"""A front that migrates and preloads, over links without sockets."""

from __future__ import annotations

import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from chorus.server.cluster.placement.settings import MigrationSettings
from chorus.server.cluster.planned import INTERVAL_SECONDS, Mover, Preloader
from chorus.server.cluster.router import FirstFit
from tests.server.cluster.test_dispatcher import OTHER, Front

SETTINGS = MigrationSettings(excess_requests=2.0)
NAMES = [f"q{index}" for index in range(6)]


@pytest.fixture
def front():
    """All requests begin at the first of two replicas, which have adapter h."""
    front = Front(2, FirstFit())
    front.calls = SimpleQueue()  # of its loop
    for link in front.links:
        front.up(link, max_num_seqs=64)
        link.loaded.add("h")
    return front


def mover_of(front):
    return Mover(front.dispatcher, "greedy", SETTINGS, front.calls.put, lambda: front.now)


def moved(front, mover):
    """Requests that move by one plan."""
    front.now += SETTINGS.interval_seconds
    before = {name: front.at(name).name for name in NAMES}
    mover.look()
    if mover.is_planning:
        front.calls.get(timeout=60)()
        assert not mover.is_planning, "the plan waited for the next look"
    return {name for name, replica in before.items() if front.at(name).name != replica}


def finish(look, is_under_way):
    deadline = time.monotonic() + 60
    while is_under_way():
        assert time.monotonic() < deadline
        time.sleep(0.001)
        look()


def test_requests_leave_a_replica_that_has_too_many_and_stay_there(front):
    mover = mover_of(front)
    for name in NAMES:
        front.ask(name, "h")
    busy, idle = front.links
    front.frame(busy, "out", None, [["q0", 1, [10, 11]]])
    found = moved(front, mover)
    assert len(found) == 3
    for name in found:
        assert ("abort", name) in busy.sent
        assert ("submit", name, 2, 4 if name == "q0" else 2) in idle.sent
    assert moved(front, mover) == set()


def test_answers_of_a_request_that_moved_reach_the_client_once(front):
    mover = mover_of(front)
    for name in NAMES:
        front.ask(name, "h")
    busy, idle = front.links
    (name, *_) = moved(front, mover)
    front.frame(busy, "out", None, [[name, 1, [10]]])  # too late
    front.frame(idle, "out", None, [[name, 2, [10]], [name, 2, [11], {"finish": "length"}]])
    assert front.tokens(name) == [10, 11] and len(front.ends(name)) == 1


def test_no_request_moves_to_a_replica_that_may_not_have_it(front):
    mover = mover_of(front)
    for name in NAMES:
        front.ask(name, "h")
    busy, idle = front.links
    idle.loaded.clear()
    front.dispatcher.fleet.changed()
    assert moved(front, mover) == set()
    idle.loaded.add("h")
    front.down(idle)
    front.up(idle, OTHER)
    idle.loaded.add("h")
    front.frame(busy, "out", None, [[name, 1, [10]] for name in NAMES])
    assert moved(front, mover) == set(), "another level's tokens may differ"


def test_a_plan_that_holds_no_more_is_not_carried_out(front):
    mover = mover_of(front)
    for name in NAMES:
        front.ask(name, "h")
    mover.look()
    assert mover.is_planning
    front.links[1].draining = True
    front.dispatcher.fleet.changed()
    assert moved(front, mover) == set()


def test_few_requests_stay(front):
    mover = mover_of(front)
    for name in NAMES[:3]:
        front.ask(name, "h")
    mover.look()
    assert not mover.is_planning


def test_replicas_have_adapters_before_the_next_request(front):
    preloader = Preloader(front.dispatcher, lambda: front.now)
    front.ask("q", "h")
    front.ask("base")
    stats = SimpleNamespace(num_pages=100, num_adapter_pages=0)
    for link in front.links:
        link.report = SimpleNamespace(stats=stats, num_yours=0)
    first, second = front.links
    first.resident = frozenset("h")
    second.loaded.clear()  # it was started again

    def place():
        front.now += INTERVAL_SECONDS
        preloader.look()
        finish(preloader.look, lambda: preloader.is_planning)

    place()
    assert ("prefetch", "h") not in first.sent and second.sent == [("load", "h", "/adapters/h")]
    front.frame(second, "loaded", "h", None, None)
    place()
    assert second.sent[-1] == ("prefetch", "h")
    second.resident = frozenset("h")
    place()
    assert second.sent.count(("prefetch", "h")) == 1
    front.dispatcher.retire("h")
    second.loaded.clear()
    place()
    assert second.sent.count(("load", "h", "/adapters/h")) == 1, "it was removed"
