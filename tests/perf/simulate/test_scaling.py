"""Replicas that follow the load in virtual time, by the hints that a cluster's launcher obeys."""

from __future__ import annotations

import itertools

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.cluster import least_loaded, simulate
from chorus.perf.simulate.controllers import Scaling
from chorus.perf.simulate.engine import MODEL
from chorus.perf.simulate.replica import Phase, Replica
from chorus.perf.workload.request import TraceRequest

PROFILE = load_profile("a10-llama2-7b-bgmv")
STEADY, BOOT = 5.0, 3.0


def serve(least, most, arrivals):
    config = EngineConfig(model=MODEL, prefix_cache=False, num_pages=400, max_num_seqs=4)
    adapters = SimAdapters(PROFILE.geometry, config.block_tokens)

    def make(index, now=0.0):
        return Replica(PROFILE, adapters, config, index=index, now=now)

    counts, scaling = [], Scaling(least, most, BOOT, STEADY)

    def look(now, replicas):
        counts.append((now, sum(one.phase is Phase.SERVING for one in replicas)))

    requests = [TraceRequest(number, time, None, 20, 30, 0) for number, time in enumerate(arrivals)]
    records = simulate(requests, [make(0)], least_loaded, watch=look, period=0.5, controller=scaling, make=make)
    assert len(records) == len(requests) and not records.num_failed
    return counts, scaling, float((records.column("arrival") + records.column("e2e")).max())


def test_replicas_come_with_the_load_and_go_after_it():
    busy = [0.25 * index for index in range(160)]  # 40 s at about twice the load that one replica serves
    calm = [40 + 2.0 * index for index in range(30)]
    counts, scaling, end = serve(1, 3, busy + calm)
    numbers = [count for _, count in counts]
    assert numbers[0] == 1 and max(numbers) >= 2 and numbers[-1] == 1
    changes = [now for (now, before), (_, after) in itertools.pairwise(counts) if before != after]
    assert all(later - sooner >= STEADY for sooner, later in itertools.pairwise(changes))
    assert end <= scaling.replica_seconds + 2 * 3 <= 3 * end + 2 * 3


def test_bounds_are_kept():
    busy = [0.05 * index for index in range(240)]
    counts, _, _ = serve(1, 2, busy)
    assert max(count for _, count in counts) == 2
    counts, scaling, end = serve(1, 1, [2.0 * index for index in range(20)])
    assert {count for _, count in counts} == {1}
    assert abs(scaling.replica_seconds - end) < 2
