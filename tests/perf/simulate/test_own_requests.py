"""A router that counts what it has sent does not send all to one replica between two reports."""

from __future__ import annotations

import pytest

from chorus.perf.simulate.own_requests import CountsOwn
from chorus.perf.simulate.study import Router
from chorus.perf.workload.request import TraceRequest
from chorus.server.cluster.router import Consolidate, MostIdle, Replicas

from ...server.cluster.replica_states import replica_state


def states():
    return Replicas(replica_state(4, [8] * count, name=str(count)) for count in (2, 0, 3))


def test_what_was_sent_counts_until_the_next_report():
    request, router = TraceRequest(0, 0.0, "a", 20, 5, 8), CountsOwn(MostIdle())
    known = states()
    assert [router(request, known) for _ in range(6)] == [1, 1, 0, 1, 0, 1]
    assert (known[1].num_requests, known[1].pending_tokens, known[1].sum_ranks) == (4, 80, 32)
    assert router(request, states()) == 1
    full = Replicas([replica_state(1, [8])])
    assert CountsOwn(Consolidate())(request, full) is None and full[0].num_requests == 1


def test_without_reports_there_is_nothing_to_count():
    with pytest.raises(ValueError, match="is for old reports"):
        Router(policy="most_idle", counts_own=True)
