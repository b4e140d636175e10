"""An API server's view of its cluster: sums over replicas, metrics, and the replicas' adapters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...core.engine_stats import METRICS, EngineStats, TenantStats
from ...memory.adapters.adapter import Tier
from ...memory.adapters.adapter_costs import REST, AdapterCost, added
from ...memory.adapters.versions import split_version
from ..engine.engine_view import MAX_TIER_SERIES, AdapterRow, EngineView, Phase, Picture, ReplicaRow
from .catalog import Catalog, CatalogEntry
from .dispatcher import Dispatcher
from .fleet import Fleet
from .in_flight_table import OpenRequest
from .link import Link

_LATEST = ("last_step", "mode", "merged_adapter")
_NAMES = tuple(one.name for one in fields(EngineStats))
NOTHING = EngineStats()


def total(stats: Iterable[EngineStats]) -> EngineStats:
    """The sum, in the format of one engine's snapshot."""
    result: dict[str, Any] = asdict(NOTHING)
    for one in stats:
        for name in _NAMES:
            value = getattr(one, name)
            if name in _LATEST:
                result[name] = value if value is not None else result[name]
            elif name in METRICS and METRICS[name].largest:
                result[name] = max(result[name], value)
            elif isinstance(value, tuple):
                result[name] = tuple(map(sum, zip_longest(result[name], value, fillvalue=0)))
            else:
                result[name] += value
    return EngineStats(**result)


def counted(stats: EngineStats) -> EngineStats:
    """Counts of a replica that is gone: the sum over replicas must not fall."""
    grown = {name: getattr(stats, name) for name, metric in METRICS.items() if metric.grows}
    return EngineStats(**grown, step_sizes=stats.step_sizes, eager_steps=stats.eager_steps)


def tenants(links: Iterable[Link]) -> list[TenantStats]:
    """Tenants, or adapters, with requests in progress on any replica, by number of requests, most first."""
    found: dict[str, TenantStats] = {}
    for link in links:
        for one in link.report.tenants if link.report is not None else ():
            before = found.get(one.name, TenantStats(one.name, 0, 0, 0.0))
            found[one.name] = TenantStats(
                one.name,
                before.num_running + one.num_running,
                before.num_waiting + one.num_waiting,
                before.standing + one.standing,
            )
    return sorted(found.values(), key=lambda one: one.num_running + one.num_waiting, reverse=True)


def view_of(fleet: Fleet, catalog: Catalog, gone: Sequence[AdapterCost] = ()) -> EngineView:
    """A snapshot, in the format of one engine's. gone: costs of adapters on replicas that have ended."""
    links = fleet.links
    reports = [link.report for link in links if link.report is not None]
    hellos = [link.hello for link in links if link.hello is not None]
    registered, nearest = catalog.registered(), _nearest_tiers(fleet)
    near = [
        (name, nearest[content], one) for name, one in registered if (content := one.manifest.content_hash) in nearest
    ]
    near.sort(key=itemgetter(0))
    counts = Counter(tier for _, tier, _ in near)
    counts[Tier.DISK] += len(registered) - len(near)
    return EngineView(
        registered=registered,
        adapters=[catalog.state_of(name, one) for name, _, one in near[:MAX_TIER_SERIES]],
        tier_counts={tier.value: counts[tier] for tier in Tier},
        running=sorted({name for report in reports for name in report.running}),
        waiting=sorted({name for report in reports for name in report.waiting}),
        max_adapters=sum(hello.max_adapters for hello in hellos),
        block_tokens=hellos[0].block_tokens if hellos else 0,
        num_quarantined=len(catalog.quarantine),
        tenants=tenants(links),
        costs=lambda: costs_of(links, registered, gone),
    )


def costs_of(
    links: Iterable[Link], registered: Iterable[tuple[str, CatalogEntry]], gone: Sequence[AdapterCost]
) -> list[AdapterCost]:
    """What adapters have cost all replicas, by name; replicas know only their contents.

    Of names with the same content the first one has its cost, and of contents without a name the rest.
    """
    names: dict[str | None, str] = {}
    for name, one in registered:
        names.setdefault(one.manifest.content_hash, split_version(name)[0])
    told = itertools.chain(gone, *(link.spent for link in links))
    return added(one._replace(name=names.get(one.name, REST)) for one in told)


def _nearest_tiers(fleet: Fleet) -> dict[str, Tier]:
    """Of each content that a replica has in memory, the best tier."""
    reported = {content for link in fleet.links if link.report is not None for content in link.report.tiers}
    return {content: fleet.tier_of(content) for content in reported}


def picture_of(
    fleet: Fleet, catalog: Catalog, requests: Iterable[OpenRequest], gone: Sequence[AdapterCost] = ()
) -> Picture:
    """A snapshot for the operator's page, without pages: only the replicas know who owns them.

    requests: open ones. A request counts as running from its first token on. gone: see `view_of`.
    """
    nearest = _nearest_tiers(fleet)
    registered, paused = catalog.registered(), frozenset(catalog.paused)

    def rows() -> list[AdapterRow]:
        return [
            (
                name,
                nearest.get(content := one.manifest.content_hash or "", Tier.DISK),
                one.manifest.rank,
                0,
                None,
                one.pinned and fleet.is_pinned(content),
                one.label,
                split_version(name)[0] in paused or name in paused,
            )
            for name, one in registered
        ]

    phases = Counter(
        (one.record["adapter"] or "", one.record["tenant"], Phase.RUNNING if one.num_output_tokens else Phase.WAITING)
        for one in requests
    )
    replicas = [
        ReplicaRow(link.name, "draining" if link.draining else "up" if link.is_up else "down", link.stats)
        for link in fleet.links
    ]
    return Picture(
        rows,
        phases,
        replicas=replicas,
        quarantined=list(catalog.quarantine.values()),
        costs=lambda: costs_of(fleet.links, registered, gone),
    )


class ClusterCollector(Collector):
    """Reads the dispatcher's counts when asked; for any thread."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        dispatcher, in_flight = self._dispatcher, self._dispatcher.in_flight
        up = sum(link.takes_requests for link in dispatcher.links)
        yield GaugeMetricFamily("chorus_replicas", "Replicas that the cluster should have", dispatcher.num_replicas)
        yield GaugeMetricFamily("chorus_replicas_up", "Replicas that accept requests", up)
        yield GaugeMetricFamily(
            "chorus_scale_hint", "1: one more replica is needed; -1: one could be removed", dispatcher.scale.value
        )
        for name in ("chorus_api_server_waiting", "chorus_front_waiting"):  # the second name: until the next release
            yield GaugeMetricFamily(name, "Requests queued at this API server", in_flight.num_waiting)
        yield CounterMetricFamily(
            "chorus_replica_deaths",
            "Connections to replicas that ended unexpectedly",
            dispatcher.num_deaths,
        )
        yield CounterMetricFamily("chorus_requests_moved", "Requests moved to another replica", in_flight.num_moves)
        yield CounterMetricFamily(
            "chorus_stale_rows", "Stale output rows of earlier attempts, discarded", in_flight.num_stale
        )
        at = GaugeMetricFamily("chorus_replica_requests", "Open requests at a replica", labels=("replica",))
        for link in dispatcher.links:
            at.add_metric((link.name,), in_flight.num_at(link.name))
        yield at
        costs = GaugeMetricFamily(
            "chorus_replica_cost_seconds", "Cost of a step as the replicas learned it, their mean", labels=("term",)
        )
        told = dispatcher.reported_costs()
        for term in told[0] if told else ():
            costs.add_metric((term,), sum(one[term] for one in told) / len(told))
        yield costs
