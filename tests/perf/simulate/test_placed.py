"""Newer routers: which replicas adapters get by their demand, and where requests go then."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.baselines import EVERY, HashedSlots, RankShares
from chorus.server.cluster.router import AnswerLengths, Estimates, Replicas, ReplicaState


@dataclass
class Asked:
    adapter: str | None
    rank: int = 8
    prompt_tokens: int = 10


def replicas(count=4):
    return Replicas(ReplicaState(32, name=f"r{index}") for index in range(count))


def where(policy, request, among, times=100):
    return Counter(policy(request, among) for _ in range(times))


def warmed(policy, shares, among):
    """Requests by `shares` of each adapter, until adapters have been placed by them."""
    asked = [request for request, count in shares for _ in range(count)]
    assert len(asked) == EVERY
    for request in asked:
        policy(request, among)
    return policy


def sets(policy, adapters, among):
    """The replicas of each adapter: a request goes there when there are the fewest requests."""
    found = {name: set() for name in adapters}
    for index in range(len(among)):
        for at, replica in enumerate(among):
            replica.num_requests = int(at != index)
        for name in adapters:
            if policy(Asked(name), among) == index:
                found[name].add(index)
    return found


def test_slots_are_shared_by_demand_and_never_more_than_there_are():
    among, cold = replicas(), [f"cold{index}" for index in range(7)]
    shares = [(Asked("hot"), EVERY - 14), *((Asked(name), 2) for name in cold)]
    policy = warmed(HashedSlots(3), shares, among)  # 12 slots, 8 adapters
    found = sets(policy, ["hot", *cold], among)
    used = Counter(index for each in found.values() for index in each)
    assert len(found["hot"]) == 4 and all(len(found[name]) == 1 for name in cold)
    assert max(used.values()) <= 3


def test_of_an_adapters_replicas_the_one_with_the_fewest_requests_serves():
    among = replicas()
    policy = warmed(HashedSlots(4), [(Asked("hot"), EVERY)], among)
    for index, replica in enumerate(among):
        replica.num_requests = 5 - index
    assert policy(Asked("hot"), among) == 3


def test_adapters_without_a_replica_go_where_the_fewest_requests_are():
    among = replicas()
    among[2].num_requests, among[0].num_requests, among[1].num_requests, among[3].num_requests = 0, 1, 1, 1
    for policy in (HashedSlots(2), RankShares(Estimates(), 0)):
        assert policy(Asked("new"), among) == policy(Asked(None, 0), among) == 2


def test_each_replica_serves_neighbouring_ranks_with_an_equal_share_of_the_demand():
    among, costs = replicas(), load_profile("a10-llama2-7b-bgmv").costs()
    policy = RankShares(Estimates(costs, answers=AnswerLengths(10.0)), 0)
    quarter = EVERY // 4
    asked = [Asked("small", 8), Asked("middle", 16), Asked("large", 32), Asked("huge", 64)]
    warmed(policy, [(request, quarter) for request in asked], among)
    places = [where(policy, request, among) for request in reversed(asked)]
    order = [index for found in places for index in sorted(one for one in found if one is not None)]
    assert order == sorted(order) and set(order) == set(range(4))  # from the largest rank to the smallest
    seconds = [costs.batch_seconds(32, 32, 32 * request.rank, request.rank) for request in asked]
    assert abs(places[0][0] / 100 - sum(seconds) / 4 / seconds[3]) < 0.1  # the part above a replica's share goes on
