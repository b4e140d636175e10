"""Requests through replicas: open and closed loops, and requests that wait at the router."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import Number, Terms, load_profile
from chorus.core.policies import Policies
from chorus.core.scheduling.service import TokenCounters
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.cluster import Happened, least_loaded, simulate
from chorus.perf.simulate.engine import MODEL
from chorus.perf.simulate.replica import Phase, Replica
from chorus.perf.workload.fields import WorkloadError
from chorus.perf.workload.request import TraceRequest
from chorus.server.cluster.router import Consolidate, FirstFit, MostIdle, Sampled
from chorus.server.cluster.router.replicas import key_of, weights

PROFILE = load_profile("a10-llama2-7b-bgmv")


def make_replicas(count, **options):
    engine = {name: options.pop(name, default) for name, default in (("max_num_seqs", 4), ("prefetch", 0))}
    profile = options.pop("profile", PROFILE)
    config = EngineConfig(model=MODEL, prefix_cache=False, num_pages=200, **engine)
    adapters = SimAdapters(PROFILE.geometry, config.block_tokens)
    for name, rank in (("a", 8), ("b", 64)):
        adapters.add(name, rank, PROFILE.geometry.adapter_bytes(rank, ("q_proj",)))
    return [Replica(profile, adapters, config, index=index, **options) for index in range(count)]


def asked(number, arrival, output=10, adapter=None):
    return TraceRequest(number, arrival, adapter, 20, output, {None: 0, "a": 8, "b": 64}[adapter])


arrivals = st.lists(
    st.tuples(st.floats(0, 0.2, allow_subnormal=False), st.integers(1, 40), st.sampled_from([None, "a", "b"])),
    min_size=1,
    max_size=30,
)


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


def test_replicas_have_names_by_which_adapters_are_hashed_to_them():
    asked_for = []

    def route(request, replicas):
        one = "abcdefgh"[request.id]
        found = weights(one, [key_of(state.name) for state in replicas])
        asked_for.append(found.index(max(found)))
        return asked_for[-1]

    simulate([asked(number, float(number)) for number in range(8)], make_replicas(3), route)
    assert set(asked_for) == {0, 1, 2}


def test_a_router_that_never_chooses_is_an_error():
    with pytest.raises(WorkloadError, match="1 requests waiting"):
        simulate([asked(0, 0.0)], make_replicas(1), lambda request, replicas: None)


def test_clients_send_one_request_after_the_other():
    replicas = make_replicas(1, max_num_seqs=8)
    most = 0

    def route(request, replicas):
        nonlocal most
        most = max(most, replicas[0].num_requests + 1)
        return 0

    records = simulate([asked(number, 0.0) for number in range(20)], replicas, route, clients=3)
    assert (len(records), most) == (20, 3)


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


# -- knowledge of routers


def seen_by(look, staleness=0.0, requests=None, **options):
    """Serve with a router that shows `look` its arguments, and takes turns."""
    turn = itertools.count()

    def route(request, replicas):
        look(request, replicas)
        return next(turn) % len(replicas)

    requests = requests or [asked(n, 0.05 * n, 40, "ab"[n % 2]) for n in range(40)]
    replicas = make_replicas(2, **{"max_num_seqs": 8, "read_threads": 1, **options})
    assert len(simulate(requests, replicas, route, staleness=staleness)) == len(requests)
    return replicas


def test_routers_see_the_kv_cache_the_link_and_the_disk():
    found = []
    free = make_replicas(1)[0].state.free_tokens

    def look(request, states):
        found.append([(s.kv_tokens, s.free_tokens, s.link_seconds, s.disk_seconds, s.num_requests) for s in states])

    requests = [asked(n, 0.004 * n, 40, "ab"[n // 20]) for n in range(40)]
    slow = Terms(terms={"latency": Number(value=0.01, source="a slow disk")})
    seen_by(look, requests=requests, profile=PROFILE.model_copy(update={"disk": slow}))
    kv_tokens, free_tokens, link, disk, requests = zip(*(row[0] for row in found), strict=True)
    assert max(kv_tokens) > 20 * 4
    assert all(
        free - kv - 16 * count - 600 <= left <= free
        for kv, left, count in zip(kv_tokens, free_tokens, requests, strict=True)
    )
    assert max(link) > 0
    assert max(disk) > 0


def test_kv_tokens_grow_while_nothing_happens():
    replica = make_replicas(1)[0]
    replica.give(asked(0, 0.0, 100))
    for _ in range(2):
        replica.advance(lambda served: None)  # the prompt, then all that follows in one go
    begun = replica.clock.now
    assert replica.look(begun).kv_tokens == 21
    assert replica.look((begun + replica.wake) / 2).kv_tokens == pytest.approx(21 + 49, abs=2)
    free = replica.look(begun).free_tokens
    assert replica.look(replica.wake).free_tokens == pytest.approx(free - 99, abs=2)


def test_what_a_router_knows_is_as_old_as_the_last_report():
    ages, kept = [], []

    def look(request, states):
        if not kept or kept[-1] is not states[0]:
            kept.append(states[0])
            ages.append(request.arrival)

    seen_by(look, 0.5)
    assert ages == pytest.approx([0.5 * n for n in range(4)], abs=1e-9)
    live = []
    seen_by(lambda request, states: live.append(states[0]))
    assert all(state is live[0] for state in live)


def test_old_knowledge_sends_all_to_one_and_a_sample_spreads():
    requests = [asked(n, 0.001 * n, 5) for n in range(400)]
    most = {}
    for name, policy in (("best", least_loaded), ("sample", Sampled(MostIdle(), 2, seed=1))):
        replicas = make_replicas(8, max_num_seqs=32)
        records = simulate(requests, replicas, policy, staleness=0.1)
        counts = [list(records.column("replica")).count(index) for index in range(8)]
        most[name] = max(list(records.column("ttft")))
        assert sum(counts) == 400
    assert most["best"] > 2 * most["sample"]


def test_a_router_that_waits_learns_of_the_end_with_the_next_report():
    replicas = make_replicas(2, max_num_seqs=1)
    records = simulate([asked(n, 0.0) for n in range(8)], replicas, FirstFit(), staleness=5.0)
    assert len(records) == 8


# -- fields of a request


def test_tenants_are_recorded():
    requests = [asked(0, 0.0)._replace(tenant="t"), asked(1, 0.1)._replace(tenant="u"), asked(2, 0.2)]
    records = simulate(requests, make_replicas(1))
    found = sorted(zip(*(records.column(name) for name in ("arrival", "tenant")), strict=True))
    assert [each[1] for each in found] == ["t", "u", None]


def test_tenants_take_turns_by_the_queue_policy():
    class Preferring(TokenCounters):
        def __init__(self, tenant):
            super().__init__()
            self._tenant = tenant

        def standing(self, tenant):
            return float(tenant != self._tenant)

    requests = [asked(n, 0.0)._replace(tenant="large") for n in range(6)]
    requests.append(asked(6, 0.001)._replace(tenant="small"))
    places = []
    for policy in (Preferring("small"), Preferring("large"), TokenCounters()):
        replica = make_replicas(1, max_num_seqs=1, policies=Policies(policy))
        records = simulate(requests, replica)
        places.append(list(records.column("tenant")).index("small"))
    assert places == [1, 6, 2], "who comes anew is lifted to those that wait"


# -- replicas that come and go


class Acts:
    """A controller that does something once, at the first event of a kind after a time."""

    def __init__(self, kind, time, action):
        self.kind, self.time, self.action = kind, time, action
        self.events = []

    def __call__(self, event, cluster):
        self.events.append(event)
        if self.action and event.kind is self.kind and event.time >= self.time:
            action, self.action = self.action, None
            action(cluster)


def stream(count, gap=0.05, output=40):
    return [asked(n, gap * n, output) for n in range(count)]


def test_a_drained_replica_ends_what_it_has_and_goes():
    replicas = make_replicas(2)
    acts = Acts(Happened.ARRIVED, 0.5, lambda cluster: cluster.drain(0))
    records = simulate(stream(40), replicas, least_loaded, controller=acts)
    assert len(records) == 40
    assert replicas[0].phase is Phase.GONE
    assert records.num_moved == 0
    late = records.column("arrival") >= 0.5
    assert set(records.column("replica")[late]) == {1}
    assert [event.replica for event in acts.events if event.kind is Happened.WENT] == [0]


def test_a_replica_boots_for_as_long_as_it_takes():
    def make(index, now):
        (replica,) = make_replicas(1, max_num_seqs=1, now=now)
        replica.index = index
        return replica

    acts = Acts(Happened.ARRIVED, 0.0, lambda cluster: cluster.boot(3.0))
    records = simulate(stream(12), make_replicas(1, max_num_seqs=1), FirstFit(), controller=acts, make=make)
    assert len(records) == 12
    came = [event for event in acts.events if event.kind is Happened.CAME]
    assert [(event.time, event.replica) for event in came] == [(0.0, 0), (3.0, 1)]
    at_new = records.column("replica") == 1
    assert at_new.any()
    assert (records.column("arrival") + records.column("ttft"))[at_new].min() > 3.0
    with pytest.raises(ValueError, match="replicas can't boot here"):
        simulate(stream(1), make_replicas(1), controller=Acts(Happened.ARRIVED, 0.0, lambda cluster: cluster.boot(1)))


def test_a_migration_takes_what_the_cost_model_says():
    """The first token after it comes when the network's latency and a prefill of prompt and answer are over."""
    network = Terms(terms={"latency": Number(value=0.25, source="made up")})
    profile = PROFILE.model_copy(update={"network": network})
    replicas = make_replicas(2, profile=profile)
    told = []

    def control(event, cluster):
        if event.kind is Happened.ARRIVED and event.request.id == 1:
            cluster.migrate(0, 0, 1)
        if event.kind is Happened.ENDED:
            told.append((event.time, event.replica))

    requests = [asked(0, 0.0, 60), asked(1, 1.0, 200)]
    records = simulate(requests, replicas, lambda request, replicas: 0, controller=control)
    assert (len(records), records.num_moved, list(records.column("replica"))) == (2, 1, [1, 0])
    alone = simulate(requests[:1], make_replicas(1, profile=profile)).column("e2e")[0]
    costs = profile.costs()
    step = costs.decode_seconds([0], 50)
    expected = costs.migrate_seconds(20 + int(1.0 / step)) - step  # the prefill draws a token, as a step would have
    assert records.column("e2e")[0] - alone == pytest.approx(expected, abs=1.5 * step)


def test_what_is_preloaded_is_there():
    (replica,) = make_replicas(1)
    assert replica.place(["a", "b"]) == []
    assert "a" in replica.state.resident
    began = replica.engine.stats().num_adapter_loads
    records = simulate([asked(0, 0.0, 10, "a"), asked(1, 0.0, 10, "b")], [replica])
    assert replica.engine.stats().num_adapter_loads == began == 2
    assert records.column("cold").max() == 0
