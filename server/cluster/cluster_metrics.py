"""Metrics of a front: its replicas, and what became of their requests."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .dispatcher import Dispatcher


class ClusterCollector(Collector):
    """Reads the dispatcher's counts when asked; any thread may."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        dispatcher, ledger = self._dispatcher, self._dispatcher.ledger
        up = sum(link.takes_requests for link in dispatcher.links)
        yield GaugeMetricFamily("chorus_replicas", "Replicas that there are to be", dispatcher.num_replicas)
        yield GaugeMetricFamily("chorus_replicas_up", "Replicas that take requests", up)
        yield GaugeMetricFamily(
            "chorus_scale_hint", "1: one more replica is needed; -1: one could be given back", dispatcher.scale.value
        )
        yield GaugeMetricFamily("chorus_front_waiting", "Requests that wait at the front", ledger.num_waiting)
        yield CounterMetricFamily(
            "chorus_replica_deaths",
            "Connections to replicas that ended, but for replicas that were to",
            dispatcher.num_deaths,
        )
        yield CounterMetricFamily(
            "chorus_requests_moved", "Times that a request went on at another replica", ledger.num_moves
        )
        yield CounterMetricFamily(
            "chorus_stale_rows", "Rows of a request's earlier places, which were dropped", ledger.num_stale
        )
        at = GaugeMetricFamily("chorus_replica_requests", "Open requests at a replica", labels=("replica",))
        for link in dispatcher.links:
            at.add_metric((link.name,), ledger.num_at(link.name))
        yield at
        costs = GaugeMetricFamily(
            "chorus_replica_cost_seconds", "What replicas have learned that a step takes, on average", labels=("term",)
        )
        told = dispatcher.reported_costs()
        for term in told[0] if told else ():
            costs.add_metric((term,), sum(one[term] for one in told) / len(told))
        yield costs
