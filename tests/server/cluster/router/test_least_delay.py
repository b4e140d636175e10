"""Least delay looks at few replicas, and chooses the one where the delay is least."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.costs.models import CostModel, DiskCost, Kernel, StepCost, TransferCost
from chorus.server.cluster.router import AnswerLengths, Estimates, Holders, LeastDelay, Replicas
from chorus.server.cluster.router.least_delay import MAX_CANDIDATES

from ..replica_states import replica_state

SEATS = 32
COSTS = CostModel(
    Kernel.SGMV,
    StepCost(base=0.02, per_token=1e-4, per_row=1e-4, per_rank=1e-5),
    DiskCost(per_byte=1e-8),
    TransferCost(per_byte=1e-9),
)


@dataclass(frozen=True)
class Asked:
    adapter: str | None = "a"
    prompt_tokens: int = 20
    rank: int | None = 8


class Looks(Replicas):
    """Replicas that note whose state is read. Once `is_known` is set, nothing may go through all of them."""

    is_known = False

    def __init__(self, states, holders=None):
        super().__init__(states, holders)
        self.seen = set()

    def __getitem__(self, index):
        self.seen.add(index)
        return super().__getitem__(index)

    def __iter__(self):
        assert not self.is_known, "a policy went through all replicas"
        return super().__iter__()


def estimates(slo=1.0, num_bytes=1 << 20):
    return Estimates(COSTS, slo, AnswerLengths(100.0), lambda name: num_bytes)


def states(loads):
    return [replica_state(SEATS, [8] * load, name=f"r{index}") for index, load in enumerate(loads)]


def held(replicas, adapters):
    """An index of adapters in the replicas' arenas; adapters: by replica."""
    holders = Holders()
    for state, names in zip(replicas, adapters, strict=True):
        state.resident = state.on_host = frozenset(names)
        holders.add(state.name, names)
    return holders


def test_a_decision_among_60_replicas_with_10000_adapters_looks_at_6():
    found = states([index % 9 for index in range(60)])
    names = [f"a{number}" for number in range(10_000)]
    holders = held(found, [names[index::7] + names[:40] for index in range(60)])
    policy, replicas, seen = LeastDelay(estimates()), Looks(found, holders), Counter()
    policy(Asked("first"), replicas)
    replicas.is_known = True
    for name in [*names[:300], None]:
        replicas.seen.clear()
        chosen = policy(Asked(name, rank=8 if name else 0), replicas)
        assert chosen in replicas.seen and len(replicas.seen) <= MAX_CANDIDATES
        seen.update(replicas.seen)
    assert len(seen) == 60


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 5), st.sampled_from(["", "a", "ä"]), st.integers(0, 99))
def test_it_names_one_of_the_replicas_whatever_the_index_holds(count, num_gone, adapter, seed):
    found = states([index % 5 for index in range(count)])
    holders = held(found, [[adapter]] * count)
    for number in range(num_gone):
        holders.add(f"gone{number}", [adapter])
    assert 0 <= LeastDelay(estimates(), seed)(Asked(adapter), Replicas(found, holders)) < count


@settings(max_examples=30)
@given(st.lists(st.integers(0, SEATS + 3), min_size=1, max_size=MAX_CANDIDATES))
def test_of_few_replicas_that_are_alike_the_least_loaded_is_taken(loads):
    assert loads[LeastDelay(estimates())(Asked(None, rank=0), Replicas(states(loads)))] == min(loads)


def test_a_replica_that_holds_the_adapter_is_worth_some_load_and_not_any():
    for load, expected in ((4, 0), (30, 1)):
        found = states([load, 3, 31, 31])
        holders = held(found, [["a"], [], [], []])
        assert LeastDelay(estimates(num_bytes=20 << 20))(Asked(), Replicas(found, holders)) == expected


def test_what_would_miss_the_slo_is_left_though_it_holds_the_adapter():
    full, other = states([3, 3])
    full = replace(full, kv_tokens=10_000, resident=frozenset("a"))
    model = replace(COSTS, step=replace(COSTS.step, per_kv_token=1e-6))
    for slo, expected in ((1.0, 0), (0.03, 1)):
        policy = LeastDelay(Estimates(model, slo, AnswerLengths(100.0), lambda name: 200_000_000))
        assert policy(Asked(), Replicas([full, other])) == expected


def test_between_two_reports_requests_do_not_go_to_one_replica():
    """The states stay the same: always taking the best of all would send all requests to the same replica."""
    replicas = Replicas(states([index % 4 for index in range(40)]))
    for adapters in ([None] * 400, [str(number) for number in range(400)]):
        policy = LeastDelay(estimates(), seed=None)
        chosen = Counter(policy(Asked(adapter), replicas) for adapter in adapters)
        assert max(chosen.values()) < 120 and len(chosen) >= 10


def test_the_same_seed_draws_the_same():
    replicas = Replicas(states([index % 3 for index in range(30)]))
    first, second = (LeastDelay(estimates(), seed=4) for _ in range(2))
    assert [first(Asked(), replicas) for _ in range(50)] == [second(Asked(), replicas) for _ in range(50)]


@pytest.mark.parametrize("count", [2, 7, 60])
def test_homes_are_the_same_everywhere_and_a_replica_that_goes_moves_its_own_alone(count):
    whole, names = Replicas(states([0] * count)), [f"a{number}" for number in range(300)]
    spread = Counter(whole[whole.homes(name)[0]].name for name in names)
    assert len(spread) > count / 2 and max(spread.values()) < 4 * 300 / count
    less = Replicas(whole[:-1])
    for name in names:
        first, second = (whole[index].name for index in whole.homes(name))
        left = [less[index].name for index in less.homes(name)]
        assert left[0] == (second if first == whole[-1].name else first)
