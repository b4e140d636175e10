"""Processors that processes share, compared with closed forms of processor sharing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.cluster import Happened, simulate
from chorus.perf.simulate.engine import MODEL
from chorus.perf.simulate.machine import Host, HostWork, Machine, Process, Works
from chorus.perf.simulate.replica import Replica
from chorus.perf.workload.request import TraceRequest
from chorus.server.cluster.router import FirstFit


def ends(processors, jobs, speed=1.0):
    """End of each (start, work), each a process of its own."""
    machine, found = Machine(processors, speed), {}
    for number, (start, work) in enumerate(jobs):
        while machine.next_end <= start:
            machine.end_next()
        machine.begin(start, work, lambda now, number=number: found.__setitem__(number, now))
    while machine.next_end < math.inf:
        machine.end_next()
    return [found[number] for number in range(len(jobs))]


@pytest.mark.parametrize(
    ("processors", "jobs", "expected"),
    [
        (math.inf, [(0, 1), (0, 2), (0, 3)], [1, 2, 3]),
        (1, [(5, 2)], [7]),
        (1, [(0, 1), (0, 1)], [2, 2]),
        (1, [(0, 1), (0, 3)], [2, 4]),  # shared until 2, then the longer one alone
        (1, [(0, 2), (1, 2)], [3, 4]),  # alone until 1, shared until 3, the last second of work alone
        (2, [(0, 1), (0, 1), (0, 1)], [1.5, 1.5, 1.5]),
        (2, [(0, 2), (0, 2), (1, 2)], [2.5, 2.5, 3.5]),
        (3, [(0, 2), (0, 2), (1, 2)], [2, 2, 3]),
        (0.5, [(0, 1)], [2]),
        (1, [(0, 1), (10, 1)], [1, 11]),  # idle between
    ],
)
def test_jobs_end_as_processor_sharing_has_it(processors, jobs, expected):
    assert ends(processors, jobs) == pytest.approx(expected)


@pytest.mark.parametrize("jobs", [[(0, 1)], [(0, 1), (0, 1), (0, 1)], [(0, 2), (1, 2), (1, 4)]])
def test_what_a_hypervisor_takes_makes_every_job_longer(jobs):
    """At half of the speed everything takes twice as long, if it begins twice as late."""
    late = [(2 * start, work) for start, work in jobs]
    assert ends(2, late, speed=0.5) == pytest.approx([2 * end for end in ends(2, jobs)])


@pytest.mark.parametrize("speed", [0, -1, 1.1, math.nan])
def test_a_processor_that_is_never_there_is_refused(speed):
    with pytest.raises(ValueError, match="at most 1"):
        Machine(2, speed)


@settings(max_examples=50)
@given(st.integers(1, 4), st.lists(st.floats(0.01, 10), min_size=1, max_size=12))
def test_no_work_is_lost_and_the_processors_are_all_used(processors, works):
    """Jobs that begin together end in order of their work; the processors are busy while as many jobs are left."""
    found = ends(processors, [(0.0, work) for work in works])
    assert sorted(range(len(works)), key=lambda i: (works[i], i)) == sorted(
        range(len(works)), key=lambda i: (found[i], works[i], i)
    )
    advance = now = 0.0
    for left, work in zip(range(len(works), 0, -1), sorted(works), strict=True):
        now += (work - advance) * max(1.0, left / processors)
        advance = work
    assert max(found) == pytest.approx(now)


def test_a_process_does_one_job_after_another_while_others_share_its_processor():
    machine, found = Machine(1), []
    one, other = Process(machine), Process(machine)
    one.do(0.0, 1.0, lambda now: found.append(("one's first", now)))
    one.do(0.0, 1.0, lambda now: found.append(("one's second", now)))
    other.do(0.0, 3.0, lambda now: found.append(("other's", now)))
    while machine.next_end < math.inf:
        machine.end_next()
    assert found == [("one's first", 2.0), ("one's second", 4.0), ("other's", 5.0)]


def test_a_job_takes_longer_the_longer_its_process_rested():
    machine, found = Machine(1), []
    process = Process(machine, per_rest=2.0)

    def done(now):
        found.append(now)

    def run(now, count):
        for _ in range(count):
            process.do(now, 1.0, done)
        while machine.next_end < math.inf:
            machine.end_next()

    run(0.0, 1)  # the first of all: after a long rest
    run(1.2, 1)  # after none
    run(2.25, 2)  # after 0.05 s, and after that job
    run(9.0, 1)  # after a long one
    assert found == pytest.approx([1.2, 2.2, 3.35, 4.35, 10.2])


def test_what_a_job_begins_when_it_ends_comes_after_it():
    machine, found = Machine(1), []
    one, other = Process(machine), Process(machine)
    one.do(0.0, 1.0, lambda now: other.do(now, 2.0, found.append))
    while machine.next_end < math.inf:
        machine.end_next()
    assert found == [3.0]


@pytest.mark.parametrize("processors", [0, -1, math.nan])
def test_a_machine_without_a_processor_is_refused(processors):
    with pytest.raises(ValueError, match="more than 0"):
        Machine(processors)


# -- replicas of one machine

PROFILE = load_profile("a10-llama2-7b-bgmv")


def replicas(count):
    config = EngineConfig(model=MODEL, prefix_cache=False, num_pages=400, max_num_seqs=8)
    adapters = SimAdapters(PROFILE.geometry, config.block_tokens)
    return [Replica(PROFILE, adapters, config, index=index) for index in range(count)]


def served(trace, count, host=None):
    """Records of each request, in order of arrival, of replicas in turn."""

    def route(request: Any, replicas: Any) -> int:
        return request.id % count

    found = simulate(trace, replicas(count), route, host=host)
    columns = zip(*map(found.column, ("arrival", "ttft", "e2e", "tokens", "replica")), strict=True)
    return sorted(tuple(float(value) for value in row) for row in columns)


def asked(number, arrival, output=20):
    return TraceRequest(number, arrival, None, 30, output)


@pytest.mark.parametrize("count", [1, 3])
def test_with_processors_for_all_nothing_changes(count):
    trace = [asked(number, 0.1 * number, 10 + number) for number in range(9)]
    assert served(trace, count, Host()) == [pytest.approx(row) for row in served(trace, count)]
    assert served(trace, count, Host(Works(processors=count))) == [pytest.approx(row) for row in served(trace, count)]


def test_two_busy_replicas_of_one_processor_take_twice_as_long():
    alone = served([asked(0, 0.0)], 1)
    both = served([asked(0, 0.0), asked(1, 0.0)], 2, Host(Works(processors=1)))
    for _, ttft, e2e, *_ in both:
        assert (ttft, e2e) == pytest.approx((2 * alone[0][1], 2 * alone[0][2]), rel=1e-5)


def test_three_busy_replicas_of_two_processors_take_half_as_long_again():
    alone = served([asked(0, 0.0)], 1)
    for _, ttft, e2e, *_ in served([asked(number, 0.0) for number in range(3)], 3, Host(Works(processors=2))):
        assert (ttft, e2e) == pytest.approx((1.5 * alone[0][1], 1.5 * alone[0][2]), rel=1e-5)


def test_a_replica_is_slower_only_while_another_is_busy():
    alone = served([asked(0, 0.0, 40)], 1)[0][2]
    short = served([asked(0, 0.0, 10)], 1)[0][2]
    found = served([asked(0, 0.0, 40), asked(1, 0.0, 10)], 2, Host(Works(processors=1)))
    e2e = {tokens: e2e for _, _, e2e, tokens, _ in found}
    assert e2e[10] == pytest.approx(2 * short, rel=1e-5)
    assert e2e[40] == pytest.approx(alone + short, rel=1e-5)


def test_front_and_client_work_before_a_request_comes_and_after_each_step():
    api_server, client = HostWork(0.5, 0.01, 0.002, 0.0), HostWork(0.25, 0.0, 0.0, 0.001)
    alone = served([asked(0, 0.0)], 1)[0]
    found = served([asked(0, 0.0)], 1, Host(Works(client, api_server, latency=0.125)))[0]
    around = 0.25 + 0.5 + 30 * 0.01 + 0.002 + 0.001 + 0.125  # steps take longer than the work that follows them
    assert found[1:3] == pytest.approx((alone[1] + around, alone[2] + around), rel=1e-5)


def test_requests_and_tokens_queue_for_the_front():
    """Three requests that come at once are routed one after another; tokens of the first wait for the last."""
    api_server = HostWork(per_prompt=100.0)  # longer than any answer
    found = served([asked(number, 0.0, 1) for number in range(3)], 3, Host(Works(api_server=api_server)))
    step = served([asked(0, 0.0, 1)], 1)[0][1]
    assert sorted(ttft for _, ttft, *_ in found) == pytest.approx([300, 300, 300 + step], rel=1e-6)


def test_the_fronts_work_for_tokens_slows_the_replica_down():
    """One processor: each step, but the last, shares it with the front's work for the step before."""
    alone = served([asked(0, 0.0)], 1)[0]
    found = served([asked(0, 0.0)], 1, Host(Works(api_server=HostWork(per_step=0.001), processors=1)))[0]
    assert found[2] == pytest.approx(alone[2] + 20 * 0.001, rel=1e-4)


def test_a_replica_that_boots_shares_the_machine():
    trace = [asked(number, 0.0) for number in range(2)]
    host = Host(Works(processors=1))
    config = EngineConfig(model=MODEL, prefix_cache=False, num_pages=400, max_num_seqs=1)
    adapters = SimAdapters(PROFILE.geometry, config.block_tokens)

    def make(index, now):
        return Replica(PROFILE, adapters, config, index=index, now=now)

    def boot(event, cluster):
        if event.kind is Happened.ARRIVED and len(cluster.replicas) == 1:
            cluster.boot(0.01)

    found = simulate(trace, [make(0, 0.0)], FirstFit(), controller=boot, make=make, host=host)
    one = served([asked(0, 0.0)], 1)[0][2]
    assert float(found.column("e2e").max()) == pytest.approx(2 * one, rel=1e-4)
