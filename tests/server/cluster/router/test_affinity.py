"""Adapter affinity: an adapter's requests stay together as long as loads are even."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from chorus.server.cluster.router import Affinity, ReplicaState


def replicas(*loads, resident=()):
    """Replicas with so many requests each; those of `resident` hold the adapter `a`."""
    return [
        ReplicaState(32, num_requests=load, name=f"r{index}", resident={"a"} if index in resident else frozenset())
        for index, load in enumerate(loads)
    ]


def asked(adapter):
    return SimpleNamespace(adapter=adapter, prompt_tokens=10, rank=8)


def test_a_request_goes_to_the_least_loaded_replica_that_holds_its_adapter():
    assert Affinity()(asked("a"), replicas(5, 6, 4, 4, resident=(0, 2))) == 2


def test_an_overloaded_holder_is_passed_over():
    choice = Affinity()(asked("a"), replicas(20, 1, 1, 1, resident=(0,)))
    assert choice in (1, 2, 3)


def test_an_adapter_that_is_nowhere_goes_where_all_its_requests_go():
    policy = Affinity()
    for name in map(str, range(20)):
        assert len({policy(asked(name), replicas(4, 4, 4)) for _ in range(3)}) == 1
    spread = Counter(policy(asked(str(index)), replicas(4, 4, 4)) for index in range(300))
    assert min(spread.values()) > 60


def test_a_replica_that_goes_moves_its_own_adapters_only():
    policy, three = Affinity(), replicas(4, 4, 4)
    for name in map(str, range(50)):
        first = policy(asked(name), three)
        if first != 2:
            assert policy(asked(name), three[:2]) == first


def test_the_base_model_goes_where_the_fewest_requests_are():
    assert Affinity()(asked(None), replicas(5, 3, 4, resident=(0,))) == 1


def test_where_no_replica_has_room_the_least_loaded_takes_it():
    assert Affinity()(asked("a"), replicas(40, 33, 50, resident=(0,))) == 1
