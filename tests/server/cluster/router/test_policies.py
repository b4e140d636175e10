"""Router policies: pure functions of a request and the replicas' states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.costs.models import CostModel, DiskCost, Kernel, StepCost, StepWork, TransferCost
from chorus.core.costs.profile import load_profile
from chorus.server.cluster.router import (
    AnswerLengths,
    Consolidate,
    Estimates,
    FirstFit,
    LeastDelay,
    MostIdle,
    PendingTime,
    Random,
    RankAware,
    Replicas,
    ReplicaState,
    Sampled,
)

from ..replica_states import replica_state

SEATS = 8


@dataclass(frozen=True)
class Asked:
    adapter: str | None = "a"
    prompt_tokens: int = 20
    rank: int | None = 64


def costs(
    kernel=Kernel.BGMV, *, base=0.03, per_rank=1e-5, per_token=1e-4, floor=0.0, per_byte=1e-9, per_kv=0.0, disk=0.0
):
    step = StepCost(base=base, weights=floor, per_token=per_token, per_rank=per_rank, per_kv_token=per_kv)
    return CostModel(kernel, step, DiskCost(per_byte=disk), TransferCost(per_byte=per_byte))


def estimates(model, slo=None, tokens=50.0, adapter_bytes=lambda name: 0, *, mix=False):
    """Answers always have so many tokens."""
    return Estimates(model, slo, AnswerLengths(tokens), adapter_bytes, mix=mix)


ranks = st.sampled_from([0, 8, 16, 64])
states = st.builds(
    replica_state,
    st.just(SEATS),
    st.lists(ranks, max_size=10),
    st.lists(st.tuples(st.integers(1, 500), ranks), max_size=4),
    st.sampled_from([0, 100, 10_000]),
    st.sampled_from([frozenset(), frozenset("a")]),
    st.sampled_from([0, 5000]),
)
clusters = st.lists(states, min_size=1, max_size=9).map(
    lambda states: Replicas(replace(state, name=str(index)) for index, state in enumerate(states))
)
requests = st.builds(Asked, st.sampled_from([None, "a", "b"]), st.integers(1, 400), ranks)
policies = st.sampled_from(
    [
        MostIdle(),
        Random(3),
        FirstFit(),
        RankAware(estimates(costs(), 0.04)),
        PendingTime(estimates(costs(), adapter_bytes=lambda name: 1 << 20)),
        LeastDelay(estimates(costs(), 0.04)),
        Consolidate(),
        Sampled(RankAware(estimates(costs(per_kv=1e-6), 0.04)), 2, seed=1),
    ]
)


def copies(replicas):
    return Replicas(state.copy() for state in replicas)


@given(policies, requests, clusters)
def test_every_policy_names_a_replica_or_waits_and_changes_nothing(policy, request, replicas):
    before = copies(replicas)
    index = policy(request, replicas)
    assert index is None or 0 <= index < len(replicas)
    assert replicas == before
    if isinstance(policy, FirstFit | Consolidate):
        fitting = [place for place, state in enumerate(replicas) if state.has_room(request)]
        assert (index in fitting) if fitting else (index is None)


@given(st.lists(st.tuples(st.booleans(), ranks), max_size=40))
def test_a_state_keeps_count(moves):
    state, here = ReplicaState(SEATS), []
    for comes, rank in moves:
        if comes:
            here.append(rank)
            state.add(rank)
        elif here:
            state.remove(here.pop(len(here) // 2))
        assert state.num_requests == len(here)
        assert state.sum_ranks == sum(here)
        assert state.max_rank == max(here, default=0)
        assert state.num_with_adapter == sum(rank > 0 for rank in here)
    assert state.ranks == Counter(here)


def test_what_waits_is_summed_up():
    state = replica_state(SEATS, [8, 8], [(10, 64), (30, 0)])
    assert (state.num_requests, state.num_waiting, state.pending_tokens) == (4, 2, 40)
    assert (state.pending_token_ranks, state.pending_max_rank, state.max_rank) == (640, 64, 64)


def test_most_idle_takes_the_fewest_requests():
    replicas = [replica_state(SEATS, [8] * count) for count in (3, 1, 1, 2)]
    assert MostIdle()(Asked(), replicas) == 1


def test_random_is_seeded_and_reaches_all():
    replicas = Replicas([ReplicaState(SEATS)] * 5)
    first, second = Random(7), Random(7)
    chosen = [first(Asked(), replicas) for _ in range(200)]
    assert chosen == [second(Asked(), replicas) for _ in range(200)]
    assert set(chosen) == set(range(5))


def test_first_fit_goes_on_when_seats_or_pages_are_short():
    full, small = replica_state(SEATS, [8] * SEATS), replica_state(SEATS, [], free_tokens=19)
    free = replica_state(SEATS, [8])
    assert FirstFit()(Asked(), [full, small, free]) == 2
    assert FirstFit()(Asked(), [full, small]) is None


@pytest.mark.parametrize(("kernel", "expected"), [("bgmv", 1), ("mbgmv", 0)])
def test_rank_aware_chooses_as_in_caraserves_example(kernel, expected):
    """Fig. 5: 24 requests of rank 32 or 16 of rank 64, SLO 36 ms; one more of rank 64 comes."""
    model = load_profile(f"a10-llama2-7b-{kernel}").costs()
    replicas = [replica_state(64, [32] * 24), replica_state(64, [64] * 16)]
    assert RankAware(estimates(model, 0.036, 58.0))(Asked(rank=64), replicas) == expected


def test_rank_aware_scores_by_hand():
    """Algorithm 1 without violations: (Δprefill / mean + Δdecode) · requests."""
    policy = RankAware(estimates(costs(base=0.0, per_rank=1e-5, per_token=1e-4), 1.0, 10.0))
    # of rank 64, 20 tokens and 64 rank-rows to prefill: 2.64e-3 / 10; a row more to decode: 1e-4
    # padded: 3 of rank 8 become 4 of rank 64: 1e-5 · (256 − 24) = 2.32e-3; + 3.64e-4; · 3 = 8.05e-3
    small = replica_state(SEATS, [8, 8, 8])
    # 5 of rank 64 become 6: 6.4e-4; + 3.64e-4; · 5 = 5.02e-3
    large = replica_state(SEATS, [64] * 5)
    assert policy(Asked(rank=64), [small, large]) == 1
    # rank 8: 3 become 4: 8e-5 + 2.08e-4 + 1e-4 = 3.88e-4, · 3 = 1.16e-3; among rank 64 it is padded as before
    assert policy(Asked(rank=8), [large, small]) == 1


def test_rank_aware_leaves_a_replica_that_would_miss_the_slo():
    policy = RankAware(estimates(costs(Kernel.SGMV, per_token=0.0), 0.0310, 10.0))
    tight, long = replica_state(SEATS, [48]), replica_state(SEATS, [8] * 4)
    assert policy(Asked(rank=64), [tight, long]) == 1  # 0.03 + 1e-5 · 112 is above, 0.03 + 1e-5 · 96 is not
    assert RankAware(estimates(costs(Kernel.SGMV), 1.0, 10.0))(Asked(rank=64), [tight, long]) == 0


def test_rank_aware_goes_where_there_is_room_first():
    full, busy = replica_state(2, [8, 8]), replica_state(SEATS, [64] * 7)
    policy = RankAware(estimates(costs(), 1.0, 10.0))
    assert policy(Asked(rank=8), [full, busy]) == 1
    assert policy(Asked(rank=8), [full, full]) == 0


@given(requests, clusters)
def test_rank_aware_is_algorithm_1_written_down(request, replicas):
    model, slo, mean = costs(floor=1e-3, per_kv=1e-6), 0.035, 20.0

    def decode(members, kv_tokens):
        users = [rank for rank in members if rank]
        if not members:
            return 0.0
        return model.batch_seconds(len(members), len(users), sum(users), max(users, default=0), kv_tokens)

    def prefill(state, *more):
        """more: the request, if it is counted."""
        if not (prompts := state.num_waiting + len(more)):
            return 0.0
        tokens = [each.prompt_tokens for each in more]
        token_ranks = sum(each.rank * each.prompt_tokens for each in more)
        ranks = [each.rank for each in more]
        return model.queue_seconds(
            state.pending_tokens + sum(tokens),
            prompts,
            state.pending_token_ranks + token_ranks,
            max(state.pending_max_rank, *ranks, 0),
        )

    def total(state):
        exists = list(state.ranks.elements())
        score = (prefill(state, request) - prefill(state)) / mean
        kv_tokens = state.kv_tokens + state.pending_tokens
        after = decode([*exists, request.rank], kv_tokens + request.prompt_tokens)
        score += after - decode(exists, kv_tokens)
        return (score + (1.0 if after > slo else 0.0)) * len(exists)

    candidates = [i for i, state in enumerate(replicas) if state.has_room(request)] or range(len(replicas))
    chosen = RankAware(estimates(model, slo, mean))(request, replicas)
    assert chosen in candidates
    if replicas[chosen].num_waiting == 0 or any(replicas[chosen].ranks):
        assert total(replicas[chosen]) <= min(total(replicas[i]) for i in candidates) + 1e-9


def test_rank_aware_prices_the_kv_cache():
    model = costs(Kernel.SGMV, per_kv=2e-6)
    short, long = replica_state(SEATS, [8] * 5, kv_tokens=500), replica_state(SEATS, [8] * 4, kv_tokens=8000)
    policy = RankAware(estimates(model, 0.045))
    assert policy(Asked(rank=8), [long, short]) == 1  # 0.03 + 8020 · 2 µs is above 45 ms
    assert RankAware(estimates(model, 0.1))(Asked(rank=8), [long, short]) == 0
    longest = replace(short, longest_tokens=9000)
    by_longest = replace(model, step=replace(model.step, per_longest=2e-6))
    assert RankAware(estimates(by_longest, 0.045))(Asked(rank=8), [longest, short]) == 1
    waiting = replica_state(SEATS, [8] * 3, [(8000, 8)])
    assert policy(Asked(rank=8), [waiting, short]) == 1  # waiting requests will be in the cache, too


def test_pending_time_counts_pages_disk_and_link():
    """It takes 0.1 s to read the adapter, and 10 ms to copy it."""
    policy = PendingTime(estimates(costs(per_byte=1e-9, disk=1e-8), adapter_bytes=lambda name: 10_000_000))
    full = replica_state(SEATS, [8] * 2, free_tokens=10, kv_tokens=1000)  # 10 tokens short: 1.5 s · 10 / 1000
    roomy = replica_state(SEATS, [8] * 3, kv_tokens=1000)
    assert policy(Asked(None, rank=0), [full, roomy]) == 1
    disk, host = replica_state(SEATS, [8]), replica_state(SEATS, [8] * 2)
    host.on_host = frozenset("a")
    assert policy(Asked("a"), [disk, host]) == 1
    host.link_seconds = 0.2
    assert policy(Asked("a"), [disk, host]) == 0
    disk.disk_seconds = 0.2
    assert policy(Asked("a"), [disk, host]) == 1


def test_a_sample_of_replicas_is_seeded_and_reaches_all():
    replicas = [replica_state(SEATS, [8] * (index % 3)) for index in range(9)]
    first, second = Sampled(MostIdle(), 2, seed=5), Sampled(MostIdle(), 2, seed=5)
    chosen = [first(Asked(), replicas) for _ in range(300)]
    assert chosen == [second(Asked(), replicas) for _ in range(300)]
    assert len(set(chosen)) == 9
    loads = [replicas[index].num_requests for index in chosen]
    assert loads.count(0) > loads.count(1) > 2 * loads.count(2)  # 21, 12 and 3 of 36 pairs
    assert Sampled(MostIdle(), 9)(Asked(), replicas) == 0
    with pytest.raises(ValueError, match="choices is 0; draw at least 1"):
        Sampled(MostIdle(), 0)


def test_rank_aware_gathers_prompts_only_where_they_hold_up_those_that_run():
    """A step takes 30 ms with one prompt or two. Apart from decoding, one that comes alone costs the others a step."""
    alone, beside = replica_state(SEATS, [64] * 3), replica_state(SEATS, [64] * 3, [(20, 64)])
    chosen = [
        RankAware(estimates(costs(Kernel.SGMV, floor=0.03), 1.0, mix=mix))(Asked(rank=64), [alone, beside])
        for mix in (False, True)
    ]
    assert chosen == [1, 0]


@given(st.lists(ranks, min_size=1, max_size=6), st.lists(st.tuples(st.integers(1, 500), ranks), max_size=2), requests)
def test_with_mixed_steps_a_prompt_costs_what_the_next_step_takes_longer(running, queue, request):
    model = costs(Kernel.SGMV, per_token=1e-3)

    def step(prompts):
        tokens = len(running) + sum(tokens for tokens, _ in prompts)
        return model.step.seconds(StepWork(tokens, len(running) + len(prompts), 0, 0, 0, 0, 0, 0.0, bool(prompts)))

    asked, policy = (request.prompt_tokens, request.rank), RankAware(estimates(model, 1.0, mix=True))
    state = replica_state(SEATS, running, queue)
    longer = policy.slowdown(request, 1e-9)(state)[0] * 1e-9  # per token of so short an answer nothing else counts
    assert longer == pytest.approx(step([*queue, asked]) - step(queue), abs=1e-7)


def test_pending_time_weighs_loading_against_queueing():
    policy = PendingTime(estimates(costs(per_byte=1e-9), adapter_bytes=lambda name: 100_000_000))  # 0.1 s to load
    cold, queue = replica_state(SEATS), replica_state(SEATS, [8], [(500, 8)], resident={"a"})  # 0.05 s to prefill
    assert policy(Asked("a"), [cold, queue]) == 1
    assert policy(Asked("b"), [cold, queue]) == 0
    longer = replica_state(SEATS, [8], [(1500, 8)], resident={"a"})
    cold.on_host = frozenset("a")
    assert policy(Asked("a"), [cold, longer]) == 0


def test_queues_are_priced_anew_by_new_costs():
    """A prefill of 500 tokens takes 50 ms, then 500 ms; a load of the adapter 100 ms."""
    known = estimates(costs(per_byte=1e-9, base=0.0), adapter_bytes=lambda name: 100_000_000)
    policy, cold = PendingTime(known), replica_state(SEATS)
    queue = replica_state(SEATS, [8], [(500, 8)], resident={"a"})
    assert policy(Asked("a"), [cold, queue]) == 1
    known.set_costs(costs(per_byte=1e-9, base=0.0, per_token=1e-3))
    assert policy(Asked("a"), [cold, queue]) == 0


def test_pending_time_counts_the_seats_that_are_missing():
    policy = PendingTime(estimates(costs()))
    full, busy = replica_state(4, [8] * 4), replica_state(SEATS, [8] * 7)
    assert policy(Asked(None, rank=0), [full, busy]) == 1


def test_consolidate_fills_the_fullest_and_the_last_among_equals():
    policy = Consolidate()
    replicas = [replica_state(SEATS, [16] * count) for count in (0, 5, 5, SEATS, 2)]
    assert policy(Asked(), replicas) == 2
    assert policy(Asked(), [replica_state(SEATS, [16] * SEATS)] * 2) is None
    assert policy(Asked(), [ReplicaState(SEATS)] * 3) == 2
