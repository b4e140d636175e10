"""Snapshots of an engine: its adapters, gauges for /metrics, and the operator's page.

Tests: tests/server/engine/test_picture.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...core.engine_stats import adapter_names_of, tenants_of
from ...core.requests.request import RequestState
from ...memory.adapters.adapter import Tier
from ...memory.adapters.adapter_costs import AdapterCost
from ...memory.adapters.versions import HasLabel, split_version, versioned
from ...memory.pages.block import BASE_VERSION, Medium
from ...memory.pages.pool import PageKind
from .metric_families import label

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.engine_stats import EngineStats, TenantStats
    from ...core.quarantine import Quarantined
    from ...memory.adapters.adapter import Adapter
    from ...memory.adapters.store import AdapterStore
    from ...memory.files.manifest import AdapterManifest


MAX_TIER_SERIES = 1000
"""Most adapters with their own series; resident ones come first."""

_SHOWN = (Tier.DEVICE, Tier.LOADING, Tier.HOST)


@dataclass(frozen=True, slots=True)
class AdapterState:
    """A snapshot of a version of an adapter: the newest, or an earlier one under the name `name@version`."""

    name: str
    version: int
    """Its number within this process."""
    manifest: AdapterManifest
    tier: Tier
    pages: int
    references: int
    """Its running requests."""
    pinned: bool
    credit: float | None = None
    """dLoRA's credit for yielding to merged adapters; None if the mode policy has none."""
    label: str = ""
    """The version that clients see."""
    paused: bool = False
    load_seconds: float | None = None
    """Seconds of its latest load; None while unknown."""

    @classmethod
    def of(cls, engine: Engine, name: str, adapter: Adapter) -> AdapterState:
        """The state of a registered version. It reads one attribute or entry after another, so no step has to wait for
        it on another thread than the engine's.
        """
        store = engine.store
        credit = None if engine.modes is None else engine.modes.policy.credit(adapter)
        return cls(
            name,
            version=adapter.version,
            manifest=adapter.manifest,
            tier=store.tier(adapter),
            pages=len(adapter.pages),
            references=adapter.references - store.pins.holds_pages_of(adapter),
            pinned=adapter in store.pins,
            credit=credit,
            label=adapter.label,
            paused=adapter.name in engine.adapters.paused,
            load_seconds=adapter.load_seconds,
        )


@dataclass(frozen=True, slots=True)
class AdapterListing:
    """Snapshots of all served adapters, and the quarantined adapters."""

    adapters: Callable[[], list[AdapterState]]
    """Makes their states, sorted by name, at the time of the call. Call it on another thread than the engine's, which
    thousands of them would delay.
    """
    quarantined: list[Quarantined]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class EngineView:
    """A snapshot, taken between two steps."""

    registered: Sequence[tuple[str, HasLabel]] = ()
    """Names and labels of all registered adapters."""
    adapters: list[AdapterState] = field(default_factory=list)
    """The ones that are not only on disk, at most `MAX_TIER_SERIES`."""
    tier_counts: dict[str, int] = field(default_factory=dict)
    """Adapters in each tier."""
    num_loadable: int = 0
    """How many more adapters of average size fit without an eviction."""
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Adapters of waiting requests; at most `max_adapters` can run at once."""
    max_adapters: int = 0
    block_tokens: int = 0
    num_quarantined: int = 0
    """Broken adapters, which are not served."""
    tenants: list[TenantStats] = field(default_factory=list)
    """Tenants, or adapters, with requests in progress."""
    costs: Callable[[], Sequence[AdapterCost]] = list
    """Makes what adapters have cost so far; call it on another thread than the engine's."""

    @classmethod
    def of(cls, engine: Engine) -> EngineView:
        """Call it on the engine's thread."""
        store, config = engine.store, engine.config
        cached = [(name, adapter, store.tier(adapter)) for name, adapter in store.cached()]
        counts = Counter(tier for *_, tier in cached)
        counts[Tier.DISK] += len(store) - len(cached)
        shown = [each for wanted in _SHOWN for each in cached if each[-1] is wanted]
        running, waiting = adapter_names_of(engine.scheduler)
        return cls(
            registered=store.registered(),
            adapters=[AdapterState.of(engine, name, adapter) for name, adapter, _ in shown[:MAX_TIER_SERIES]],
            block_tokens=engine.block_tokens,
            tier_counts={tier.value: counts[tier] for tier in Tier},
            num_loadable=store.num_loadable,
            running=running,
            waiting=waiting,
            max_adapters=config.max_adapters_per_step or config.max_num_seqs,
            num_quarantined=len(engine.adapters.quarantine),
            tenants=tenants_of(engine.scheduler),
            costs=store.spent.so_far,
        )

    def labels(self) -> frozenset[str]:
        """Metrics' labels of all registered adapters, with and without their versions."""
        names = (
            each for name, one in self.registered for each in (name, split_version(name)[0], versioned(name, one.label))
        )
        return frozenset(map(label, names))


class Phase(StrEnum):
    """Phase of a request. PAUSED: descheduled; it keeps its pages and is not in the step's batch."""

    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"


class Holding(NamedTuple):
    """Pages and their owner: KV of a tenant's requests for an adapter ("": the base model), or an adapter's weights."""

    kind: PageKind
    adapter: str
    tenant: str
    pages: Sequence[int]


AdapterRow = tuple[str, Tier, int, int, int | None, bool, str, bool]
"""A version of an adapter: name, tier, rank, pages that it takes when resident, number of its requests (None: unknown),
pinned, label, paused. It is a plain tuple because thousands are made per second.
"""


class PrefixRow(NamedTuple):
    """Tokens of cached prefixes of a version of an adapter ("": the base model), by where they are.

    A block may be in several places at once.
    """

    name: str
    pool: int
    host: int
    files: int


class ReplicaRow(NamedTuple):
    """A replica of a cluster; stats is None before its first report."""

    name: str
    state: str
    stats: EngineStats | None


@dataclass(frozen=True, slots=True)
class Picture:
    """A snapshot."""

    adapters: Callable[[], list[AdapterRow]] = list
    """Makes the adapters' rows at the time of the call. Call it on another thread than the engine's."""
    phases: Counter[tuple[str, str, Phase]] = field(default_factory=Counter)
    """Number of requests by adapter ("" for the base model), tenant and phase."""
    kinds: bytes = b""
    """A byte for each page; empty if the engine is elsewhere."""
    holdings: list[Holding] = field(default_factory=list)
    """Owners of pages, for pages that have one."""
    replicas: list[ReplicaRow] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    """Adapters that are not served."""
    costs: Callable[[], Sequence[AdapterCost]] = list
    """See `EngineView`."""
    prefixes: Callable[[], list[PrefixRow]] = list
    """Makes rows of the models that have cached prefixes; call it on another thread than the engine's."""

    @classmethod
    def of(cls, engine: Engine) -> Picture:
        """Call it on the engine's thread."""
        store, scheduler = engine.store, engine.scheduler
        running, most, only = scheduler.running, engine.config.max_num_seqs, scheduler.eligible_adapters
        seated = set(running[:most] if running.chosen is None else running.chosen)
        phases: Counter[tuple[str, str, Phase]] = Counter()
        holdings: list[Holding] = []
        for request in running:
            adapter = request.adapter_name or ""
            sits = request in seated and (only is None or request.adapter in only)
            phases[adapter, request.tenant, Phase.RUNNING if sits else Phase.PAUSED] += 1
            if request.state is RequestState.RUNNING or request.state is RequestState.LOADING:
                holdings.append(Holding(PageKind.KV, adapter, request.tenant, request.block_table.held))
        for request in scheduler.waiting:
            phases[request.adapter_name or "", request.tenant, Phase.WAITING] += 1
        holdings += (Holding(PageKind.ADAPTER, one.name, "", one.pages) for one in store.resident())
        registered = store.registered()
        return cls(
            partial(_rows, store, registered, engine.adapters.paused),
            phases,
            engine.pool.kinds().tobytes(),
            holdings,
            quarantined=list(engine.adapters.quarantine.values()),
            costs=store.spent.so_far,
            prefixes=partial(_prefixes, engine, registered),
        )


def _rows(store: AdapterStore, registered: Sequence[tuple[str, Adapter]], paused: Collection[str]) -> list[AdapterRow]:
    """Rows of adapters. It reads one attribute or entry after another, so no step has to wait for it."""
    near, tier, pins = store.images.keys(), store.tier, store.pins
    return [
        (
            name,
            tier(one) if one.pages or one in near else Tier.DISK,
            one.rank,
            one.layout.num_pages,
            one.uses,
            one in pins,
            one.label,
            one.name in paused,
        )
        for name, one in registered
    ]


def _prefixes(engine: Engine, registered: Sequence[tuple[str, Adapter]]) -> list[PrefixRow]:
    """Rows of models that have cached prefixes. It reads one entry after another, so no step has to wait for it."""
    count, disk, step = engine.prefix.num_blocks, engine.disk, engine.block_tokens
    found: list[PrefixRow] = []
    for name, version in (("", BASE_VERSION), *((name, one.version) for name, one in registered)):
        in_files = 0 if disk is None else disk.num_blocks(version)
        places = count[version, Medium.POOL], count[version, Medium.HOST], in_files
        if any(places):
            found.append(PrefixRow(name, *(step * blocks for blocks in places)))
    return found
