"""Requests through replicas: open and closed loops, and what waits at the router."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.cluster import least_loaded, simulate, simulate_clients
from chorus.perf.simulate.engine import MODEL
from chorus.perf.simulate.replica import Replica
from chorus.perf.workload.request import TraceRequest
from chorus.server.cluster.router import Consolidate, FirstFit

PROFILE = load_profile("a10-llama2-7b-bgmv")


def make_replicas(count, **options):
    engine = {name: options.pop(name, default) for name, default in (("max_num_seqs", 4), ("prefetch", 0))}
    config = EngineConfig(model=MODEL, prefix_cache=False, num_pages=200, **engine)
    adapters = SimAdapters(PROFILE.geometry.page_layout(config.block_tokens))
    for name, rank in (("a", 8), ("b", 64)):
        adapters.add(name, rank, PROFILE.geometry.adapter_bytes(rank, ("q_proj",)))
    return [Replica(PROFILE, adapters, config, index=index, **options) for index in range(count)]


def asked(number, arrival, output=10, adapter=None):
    return TraceRequest(number, arrival, adapter, 20, output, {None: 0, "a": 8, "b": 64}[adapter])


arrivals = st.lists(
    st.tuples(
        st.floats(0, 0.2, allow_subnormal=False), st.integers(1, 40), st.sampled_from([None, "a", "b"])
    ),
    min_size=1,
    max_size=30,
)  # fmt: skip


@settings(max_examples=40)
@given(
    arrivals, st.sampled_from([least_loaded, FirstFit(), Consolidate()]), st.booleans(), st.booleans(), st.booleans()
)
def test_all_requests_are_served_and_states_tell_the_truth(trace, policy, mix, stream, keep_idle):
    replicas = make_replicas(3, mix=mix, stream=stream, keep_idle=keep_idle)

    def look(time, seen):
        for replica in seen:
            stats = replica.engine.stats()
            inside = stats.num_running + stats.num_waiting
            assert inside <= replica.state.num_requests
            assert sum(replica.state.ranks.values()) == replica.state.num_requests
            assert replica.state.num_waiting >= stats.num_waiting

    now, requests = 0.0, []
    for number, (gap, output, adapter) in enumerate(trace):
        now += gap
        requests.append(asked(number, now, output, adapter))
    records = simulate(requests, replicas, policy, watch=look, period=0.05)
    assert len(records) == len(requests)
    assert sorted(records.column("tokens")) == sorted(output for _, output, _ in trace)
    assert (records.column("ttft") > 0).all()
    assert all(r.state.num_requests == r.state.num_waiting == r.state.sum_ranks == 0 for r in replicas)


def test_who_waits_at_the_router_is_served_in_order_of_arrival():
    replicas = make_replicas(2, max_num_seqs=1)
    records = simulate([asked(number, 0.001 * number) for number in range(6)], replicas, Consolidate())
    order = records.column("arrival") + records.column("ttft")
    by_arrival = [first for _, first in sorted(zip(records.column("arrival"), order, strict=True))]
    assert by_arrival == sorted(by_arrival)
    assert set(records.column("replica")) == {0, 1}


def test_a_router_that_never_chooses_is_an_error():
    with pytest.raises(RuntimeError, match="1 requests waiting"):
        simulate([asked(0, 0.0)], make_replicas(1), lambda request, replicas: None)


def test_clients_send_one_request_after_the_other():
    replicas = make_replicas(1, max_num_seqs=8)
    most = 0

    def route(request, states):
        nonlocal most
        most = max(most, states[0].num_requests + 1)
        return 0

    records = simulate_clients([asked(number, 0.0) for number in range(20)], 3, replicas, route)
    assert (len(records), most) == (20, 3)
    once = float((records.column("arrival") + records.column("e2e")).max())
    slow = simulate_clients([asked(n, 0.0) for n in range(20)], 3, make_replicas(1, max_num_seqs=8), think=1.0)
    assert float((slow.column("arrival") + slow.column("e2e")).max()) > once + 5


def test_clients_go_on_with_their_adapters():
    asked_for = []

    def route(request, states):
        asked_for.append((request.adapter, request.rank))
        return 0

    def serve(turns):
        asked_for.clear()
        requests = [asked(n, 0.0, 5, "ab"[n % 2]) for n in range(60)]
        simulate_clients(requests, 1, make_replicas(1), route, turns=turns, seed=1)
        assert set(asked_for) == {("a", 8), ("b", 64)}
        return sum(one == other for one, other in itertools.pairwise(asked_for))

    assert serve(1.0) == 0
    assert 20 < serve(2.0) < 45 < serve(20.0)


def test_a_load_that_blocks_the_step_is_a_cold_start_and_one_ahead_of_it_is_none():
    for prefetch, cold in ((0, 2), (1, 1)):
        (replica,) = make_replicas(1, max_num_seqs=1, prefetch=prefetch, stream=False)
        simulate([asked(n, 0.01 * n, 20, name) for n, name in enumerate("aabb")], [replica])
        assert replica.engine.num_cold_starts == cold


def test_prefills_apart_hold_up_decoding():
    ends = []
    for mix in (True, False):
        records = simulate([asked(n, 0.1 * n, 30) for n in range(8)], make_replicas(1, max_num_seqs=8, mix=mix))
        ends.append(records.column("tpot").mean())
    assert ends[1] > 1.05 * ends[0]


def test_idle_adapters_are_dropped_on_request():
    loads = []
    for keep_idle in (True, False):
        replicas = make_replicas(1, keep_idle=keep_idle)
        simulate([asked(n, 2.0 * n, 5, "a") for n in range(4)], replicas)
        loads.append(replicas[0].engine.stats().num_adapter_loads)
    assert loads == [1, 4]


def test_arrivals_out_of_order_are_refused():
    with pytest.raises(ValueError, match="request 1 arrives at 0 s, after one at 1 s"):
        simulate([asked(0, 1.0), asked(1, 0.0)], make_replicas(1))
