"""Time that a server adds to its engine's: added to simulated requests, and found again from what clients saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import load_profile
from chorus.perf.serving.record import LoadError
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.cluster import simulate
from chorus.perf.simulate.over_http import HostTimes, HttpServer, fit_host, served
from chorus.perf.simulate.replica import Replica
from chorus.perf.workload.request import TraceRequest
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL

PROFILE = load_profile("a100-llama2-7b")
NOTHING = HostTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
CONFIG = EngineConfig(model=Path("fake"), num_pages=2000, prefix_cache=False, max_num_seqs=16, max_waiting=None)


def in_virtual_time(profile, trace):
    adapters = SimAdapters(profile.geometry.page_layout(CONFIG.block_tokens))
    return simulate(trace, [Replica(profile, adapters, CONFIG)])


class SimulatedServer:
    """A server whose host takes times that are known."""

    def __init__(self, host):
        self._host = host

    def serve(self, trace):
        return self._host.simulate(in_virtual_time, PROFILE, trace), list(trace)


def trace_of(*arrivals, prompt=20, output=5):
    return [TraceRequest(index, arrival, None, prompt, output) for index, arrival in enumerate(arrivals)]


def test_a_host_without_times_changes_nothing():
    trace = trace_of(0.0, 0.01, 0.3)
    found, alone = NOTHING.simulate(in_virtual_time, PROFILE, trace), in_virtual_time(PROFILE, trace)
    for name in ("arrival", "ttft", "e2e", "tokens"):
        assert found.column(name) == pytest.approx(alone.column(name))


def test_latency_and_intake_come_before_the_first_token():
    host = HostTimes(0.0, 0.0, 0.0, latency=0.25, intake=0.5, intake_per_token=0.01)
    trace = trace_of(10.0, output=1)
    found, alone = host.simulate(in_virtual_time, PROFILE, trace), in_virtual_time(PROFILE, trace)
    for name in ("ttft", "e2e"):
        assert found.column(name) == pytest.approx(alone.column(name) + 0.25 + 0.5 + 20 * 0.01, rel=1e-5)
    assert found.column("arrival") == pytest.approx([10.0])


def test_intakes_come_one_after_another():
    host = HostTimes(0.0, 0.0, 0.0, latency=0.0, intake=1.0, intake_per_token=0.0)
    found = host.simulate(in_virtual_time, PROFILE, trace_of(0.0, 0.0, 0.0, 50.0, output=1))
    alone = in_virtual_time(PROFILE, trace_of(0.0, output=1)).column("ttft")[0]
    assert found.column("ttft") == pytest.approx([alone + 1, alone + 2, alone + 3, alone + 1], rel=1e-3)


@pytest.mark.parametrize("times", [(0.0, 0.0, 0.0), (0.002, 0.0001, 0.003), (0.0, 0.0005, 0.0)])
def test_times_of_steps_make_answers_longer(times):
    per_step, per_row, per_prompt = times
    host = HostTimes(per_step, per_row, per_prompt, 0.0, 0.0, 0.0)
    trace = trace_of(0.0, output=11)
    found, alone = (each.simulate(in_virtual_time, PROFILE, trace) for each in (host, NOTHING))
    tokens = 10 * (per_step + per_row)
    assert found.column("e2e") - found.column("ttft") == pytest.approx(
        alone.column("e2e") - alone.column("ttft") + tokens, rel=1e-3
    )
    assert found.column("ttft") == pytest.approx(alone.column("ttft") + per_step + per_row + per_prompt, rel=1e-3)


def test_the_fit_finds_what_a_server_adds():
    host = HostTimes(0.002, 0.0003, 0.004, latency=0.05, intake=0.02, intake_per_token=0.001)
    found = fit_host(SimulatedServer(host), PROFILE, in_virtual_time, rows=16)
    for name in ("per_step", "per_row", "per_prompt", "latency", "intake", "intake_per_token"):
        assert getattr(found, name) == pytest.approx(getattr(host, name), rel=0.1), name


def test_a_server_of_our_own_counts_what_was_asked_for():
    config = EngineConfig(
        model=BUILTIN_MODEL, adapters=BUILTIN_ADAPTERS, threads=1, max_num_seqs=4, max_num_batched_tokens=64,
        memory_bytes=32 << 20,
    )  # fmt: skip
    trace = [
        TraceRequest(0, 0.0, None, 20, 6),
        TraceRequest(1, 0.01, "upper", 33, 1),
        TraceRequest(2, 0.02, None, 7, 9),
    ]
    with served(config) as server:
        records, counted = server.serve(trace)
        with pytest.raises(LoadError, match="no-such-adapter"):
            server.serve([trace[0]._replace(adapter="no-such-adapter")])
    assert isinstance(server, HttpServer)
    assert records.column("tokens").tolist() == [6, 1, 9]
    assert [request.prompt_tokens for request in counted] == [20, 33, 7]
    assert [request._replace(prompt_tokens=0) for request in counted] == [r._replace(prompt_tokens=0) for r in trace]
    assert (records.column("ttft") > 0).all()
    assert (records.column("e2e") >= records.column("ttft")).all()
