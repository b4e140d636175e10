"""An API server that migrates and preloads, over links without sockets."""

from __future__ import annotations

import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from chorus.server.cluster.placement.settings import MigrationSettings
from chorus.server.cluster.planned import INTERVAL_SECONDS, Mover, Preloader
from chorus.server.cluster.router import FirstFit
from tests.server.cluster.test_dispatcher import OTHER, ApiServer

SETTINGS = MigrationSettings(excess_requests=2.0)
NAMES = [f"q{index}" for index in range(6)]


@pytest.fixture
def api_server():
    """All requests begin at the first of two replicas, which have adapter h."""
    api_server = ApiServer(2, FirstFit())
    api_server.calls = SimpleQueue()  # of its loop
    for link in api_server.links:
        api_server.up(link, max_num_seqs=64)
        link.loaded.add("h")
    return api_server


def mover_of(api_server):
    return Mover(api_server.dispatcher, "greedy", SETTINGS, api_server.calls.put, lambda: api_server.now)


def moved(api_server, mover):
    """Requests that move by one plan."""
    api_server.now += SETTINGS.interval_seconds
    before = {name: api_server.at(name).name for name in NAMES}
    mover.look()
    if mover._plan is not None:  # noqa: SLF001
        api_server.calls.get(timeout=60)()
        assert mover._plan is None, "the plan waited for the next look"  # noqa: SLF001
    return {name for name, replica in before.items() if api_server.at(name).name != replica}


def finish(look, is_under_way):
    deadline = time.monotonic() + 60
    while is_under_way():
        assert time.monotonic() < deadline
        time.sleep(0.001)
        look()


def test_requests_leave_a_replica_that_has_too_many_and_stay_there(api_server):
    mover = mover_of(api_server)
    for name in NAMES:
        api_server.ask(name, "h")
    busy, idle = api_server.links
    api_server.frame(busy, "out", None, [["q0", 1, [10, 11]]])
    found = moved(api_server, mover)
    assert len(found) == 3
    for name in found:
        assert ("abort", name) in busy.sent
        assert ("submit", name, 2, 4 if name == "q0" else 2) in idle.sent
    assert moved(api_server, mover) == set()


def test_answers_of_a_request_that_moved_reach_the_client_once(api_server):
    mover = mover_of(api_server)
    for name in NAMES:
        api_server.ask(name, "h")
    busy, idle = api_server.links
    (name, *_) = moved(api_server, mover)
    api_server.frame(busy, "out", None, [[name, 1, [10]]])  # too late
    api_server.frame(idle, "out", None, [[name, 2, [10]], [name, 2, [11], {"finish": "length"}]])
    assert api_server.tokens(name) == [10, 11] and len(api_server.ends(name)) == 1


def test_no_request_moves_to_a_replica_that_may_not_have_it(api_server):
    mover = mover_of(api_server)
    for name in NAMES:
        api_server.ask(name, "h")
    busy, idle = api_server.links
    idle.loaded.clear()
    api_server.dispatcher.fleet.changed()
    assert moved(api_server, mover) == set()
    idle.loaded.add("h")
    api_server.down(idle)
    api_server.up(idle, OTHER)
    idle.loaded.add("h")
    api_server.frame(busy, "out", None, [[name, 1, [10]] for name in NAMES])
    assert moved(api_server, mover) == set(), "another level's tokens may differ"


def test_a_plan_that_holds_no_more_is_not_carried_out(api_server):
    mover = mover_of(api_server)
    for name in NAMES:
        api_server.ask(name, "h")
    mover.look()
    assert mover._plan is not None  # noqa: SLF001
    api_server.links[1].draining = True
    api_server.dispatcher.fleet.changed()
    assert moved(api_server, mover) == set()


def test_few_requests_stay(api_server):
    mover = mover_of(api_server)
    for name in NAMES[:3]:
        api_server.ask(name, "h")
    mover.look()
    assert mover._plan is None  # noqa: SLF001


def test_replicas_have_adapters_before_the_next_request(api_server):
    preloader = Preloader(api_server.dispatcher, lambda: api_server.now)
    api_server.ask("q", "h")
    api_server.ask("base")
    stats = SimpleNamespace(num_pages=100, num_adapter_pages=0)
    for link in api_server.links:
        link.report = SimpleNamespace(stats=stats, num_yours=0)
    first, second = api_server.links
    first.resident = frozenset("h")
    second.loaded.clear()  # it was started again

    def place():
        api_server.now += INTERVAL_SECONDS
        preloader.look()
        finish(preloader.look, lambda: preloader._plan is not None)  # noqa: SLF001

    place()
    assert ("prefetch", "h") not in first.sent and second.sent == [("load", "h", "/adapters/h")]
    api_server.frame(second, "loaded", "h", None, None)
    place()
    assert second.sent[-1] == ("prefetch", "h")
    second.resident = frozenset("h")
    place()
    assert second.sent.count(("prefetch", "h")) == 1
    api_server.dispatcher.retire("h")
    second.loaded.clear()
    place()
    assert second.sent.count(("load", "h", "/adapters/h")) == 1, "it was removed"
