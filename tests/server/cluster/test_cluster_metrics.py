"""An API server's metrics sum up its replicas' reports."""

from __future__ import annotations

from types import SimpleNamespace

from chorus.server.cluster.cluster_view import ClusterCollector
from chorus.server.cluster.in_flight_table import InFlightTable


def costs(told):
    dispatcher = SimpleNamespace(
        links=[],
        in_flight=InFlightTable(),
        num_replicas=2,
        num_deaths=0,
        scale=SimpleNamespace(value=0),
        reported_costs=lambda: told,
    )
    families = {one.name: one for one in ClusterCollector(dispatcher).collect()}
    return {one.labels["term"]: one.value for one in families["chorus_replica_cost_seconds"].samples}


def test_step_costs_are_the_mean_of_what_replicas_have_learned():
    assert costs([{"base": 0.01, "disk": 1e-9}, {"base": 0.03, "disk": 3e-9}]) == {"base": 0.02, "disk": 2e-9}
    assert costs([]) == {}
