"""Traces that a launched server serves in real time."""

from __future__ import annotations

import pytest

from chorus.core.config import EngineConfig
from chorus.perf.serving.errors import LoadError
from chorus.perf.simulate.agreement.fleet import cluster
from chorus.perf.workload.request import TraceRequest
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL


@pytest.mark.slow
def test_a_cluster_of_our_own_counts_what_was_asked_for():
    config = EngineConfig(
        model=BUILTIN_MODEL,
        adapters=BUILTIN_ADAPTERS,
        threads=1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        memory_bytes=32 << 20,
    )
    trace = [
        TraceRequest(0, 0.0, None, 20, 6),
        TraceRequest(1, 0.01, "upper", 33, 1),
        TraceRequest(2, 0.02, None, 7, 9),
    ]
    with cluster(config, 1, "first-fit") as (_, server):
        records, counted = server.serve(trace)
        with pytest.raises(LoadError, match="no-such-adapter"):
            server.serve([trace[0]._replace(adapter="no-such-adapter")])
    assert set(server.spent) == {"client", "front", "replica"} and min(server.spent.values()) > 0
    assert records.column("tokens").tolist() == [6, 1, 9]
    assert [request.prompt_tokens for request in counted] == [20, 33, 7]
    assert [request._replace(prompt_tokens=0) for request in counted] == [r._replace(prompt_tokens=0) for r in trace]
    assert (records.column("ttft") > 0).all()
    assert (records.column("e2e") >= records.column("ttft")).all()
