"""Controls of rank-aware routing take away the information that they name, and nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.baselines import CountsOwn, mean_rank, rank_blind
from chorus.perf.simulate.engine import MODEL
from chorus.perf.simulate.replica import Replica
from chorus.perf.simulate.setup import Router
from chorus.perf.workload import WorkloadSpec
from chorus.perf.workload.request import TraceRequest
from chorus.server.cluster.router import (
    AnswerLengths,
    Consolidate,
    Estimates,
    LeastDelay,
    MostIdle,
    PendingTime,
    RankAware,
    Replicas,
)

from ...server.cluster.replica_states import replica_state

MEAN, SEATS, SLO = 30, 8, 0.1
PROFILES = ["a10-llama2-7b-bgmv", "a10-llama2-7b-mbgmv"]

ranks = st.sampled_from([8, 64])
waiting = st.lists(st.tuples(st.integers(1, 500), ranks), max_size=4)
shapes = st.lists(st.tuples(st.lists(ranks, max_size=SEATS - 1), waiting), min_size=1, max_size=6)
asked = st.builds(lambda tokens, rank: TraceRequest(0, 0.0, "a", tokens, 50, rank), st.integers(1, 400), ranks)


def cluster(shapes, rank=None):
    """States of replicas; rank: in place of every adapter's own."""
    return Replicas(
        replica_state(
            SEATS,
            [rank or each for each in running],
            [(tokens, rank or each) for tokens, each in queue],
            name=str(index),
        )
        for index, (running, queue) in enumerate(shapes)
    )


def estimates(profile, tokens=50.0, *, mix=False):
    return Estimates(load_profile(profile).costs(), SLO, AnswerLengths(tokens), mix=mix)


def rank_aware(profile, tokens=50.0, *, mix=False):
    return RankAware(estimates(profile, tokens, mix=mix))


@given(shapes, asked, st.sampled_from(PROFILES), st.booleans())
def test_without_ranks_every_adapter_has_the_mean_rank(shapes, request, profile, mix):
    for policy in (RankAware, PendingTime, LeastDelay):
        blind = rank_blind(policy(estimates(profile, mix=mix)), MEAN)(request, cluster(shapes, MEAN))
        assert blind == policy(estimates(profile, mix=mix))(request._replace(rank=MEAN), cluster(shapes, MEAN))


@given(shapes, asked, st.sampled_from(PROFILES), st.booleans())
def test_with_neither_ranks_nor_prompts_only_the_number_of_requests_is_left(shapes, request, profile, mix):
    replicas = Replicas(state for state in cluster(shapes, MEAN) if state.has_room(request))
    if replicas:
        control = rank_blind(rank_aware(profile, math.inf, mix=mix), MEAN)
        chosen, idle = control(request, replicas), MostIdle()(request, replicas)
        assert chosen is not None and idle is not None
        assert replicas[chosen].num_requests == replicas[idle].num_requests


@given(shapes, asked, st.sampled_from(PROFILES), st.booleans())
def test_without_prices_of_prompts_it_does_not_matter_which_requests_wait(shapes, request, profile, mix):
    control = rank_aware(profile, math.inf, mix=mix)
    running = [([*running, *(rank for _, rank in queue)], []) for running, queue in shapes]
    assert control(request, cluster(shapes)) == control(request, cluster(running))


def test_replicas_tell_one_rank_of_every_adapter():
    profile, config = load_profile(PROFILES[0]), EngineConfig(model=MODEL, prefix_cache=False)
    adapters = SimAdapters(profile.geometry, config.block_tokens)
    for name, rank in (("a", 8), ("b", 64)):
        adapters.add(name, rank)
    blind, seeing = (Replica(profile, adapters, config, told_rank=told) for told in (MEAN, None))
    for replica, ranks in ((blind, [0, MEAN, MEAN]), (seeing, [0, 8, 64])):
        for number, name in enumerate((None, "a", "b")):
            replica.give(TraceRequest(number, 0.0, name, 20, 50))
        assert (replica.state.sum_ranks, replica.state.pending_token_ranks) == (sum(ranks), 20 * sum(ranks))


@pytest.mark.parametrize(("share", "mean"), [(0.0, 40), (0.5, 40), (1.0, 1)])
def test_the_mean_is_that_of_the_requests_with_adapters(share, mean):
    spec = WorkloadSpec.parse(
        {
            "requests": 4000,
            "arrivals": {"process": "poisson", "rate": 10.0},
            "popularity": {"kind": "uniform"},
            "lengths": {"kind": "alpaca"},
            "adapters": {
                "count": 4000,
                "base_share": share,
                "ranks": {"kind": "choice", "ranks": [20, 60], "weights": [0.5, 0.5]},
            },
        }
    )
    assert mean_rank(spec) == pytest.approx(mean, abs=2)


def known_states():
    return Replicas(replica_state(4, [8] * count, name=str(count)) for count in (2, 0, 3))


def test_what_was_sent_counts_until_the_next_report():
    request, router = TraceRequest(0, 0.0, "a", 20, 5, 8), CountsOwn(MostIdle())
    known = known_states()
    assert [router(request, known) for _ in range(6)] == [1, 1, 0, 1, 0, 1]
    assert (known[1].num_requests, known[1].pending_tokens, known[1].sum_ranks) == (4, 80, 32)
    assert router(request, known_states()) == 1
    full = Replicas([replica_state(1, [8])])
    assert CountsOwn(Consolidate())(request, full) is None and full[0].num_requests == 1


def test_without_reports_there_is_nothing_to_count():
    with pytest.raises(ValueError, match="is for old reports"):
        Router(policy="most_idle", counts_own=True)
