"""What /metrics shows of an engine beside its counters: a snapshot, taken between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...memory.adapters.adapter import Tier
from ...memory.adapters.versions import HasLabel, versioned
from .metric_families import label

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.engine_stats import AccountStats
    from ...memory.adapters.adapter import Adapter

MAX_TIER_SERIES = 1000
"""Most adapters with a series of their own; resident ones come first."""

_SHOWN = (Tier.DEVICE, Tier.LOADING, Tier.HOST)


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter that is not only on disk. load_seconds: how long its latest load took; None while unknown.

    credit: for having given way to others; None where the policy of modes keeps none.
    """

    name: str
    tier: Tier
    rank: int
    pinned: bool
    load_seconds: float | None
    credit: float | None

    @classmethod
    def of(cls, engine: Engine, name: str, adapter: Adapter, tier: Tier) -> AdapterView:
        credit = None if engine.modes is None else engine.modes.credit(adapter)
        return cls(name, tier, adapter.rank, engine.store.is_pinned(adapter), adapter.load_seconds, credit)


@dataclass(frozen=True, slots=True)
class EngineView:
    """A snapshot, taken between two steps.

    registered: names and labels of all registered adapters. adapters: the ones that are not only on disk, at most
    `MAX_TIER_SERIES`.
    tier_counts: adapters in each tier. num_loadable: how many more adapters of average size fit without an eviction.
    running, waiting: adapters of running and of waiting requests; at most `max_adapters` can run at once.
    num_quarantined: broken adapters, which are not served. accounts: tenants, or adapters, with requests in progress.
    """

    registered: Sequence[tuple[str, HasLabel]] = ()
    adapters: list[AdapterView] = field(default_factory=list)
    tier_counts: dict[str, int] = field(default_factory=dict)
    num_loadable: int = 0
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    max_adapters: int = 0
    block_tokens: int = 0
    num_quarantined: int = 0
    accounts: list[AccountStats] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine) -> EngineView:
        """To be called on the engine's thread."""
        store, config = engine.store, engine.config
        cached = [(name, adapter, store.tier(adapter)) for name, adapter in store.cached()]
        counts = Counter(tier for *_, tier in cached)
        counts[Tier.DISK] += len(store) - len(cached)
        shown = [each for wanted in _SHOWN for each in cached if each[-1] is wanted]
        running, waiting = engine.adapter_load()
        return cls(
            registered=store.registered(),
            adapters=[AdapterView.of(engine, *each) for each in shown[:MAX_TIER_SERIES]],
            block_tokens=engine.block_tokens,
            tier_counts={tier.value: counts[tier] for tier in Tier},
            num_loadable=store.num_loadable,
            running=running,
            waiting=waiting,
            max_adapters=config.max_adapters_per_step or config.max_num_seqs,
            num_quarantined=len(engine.adapters.quarantine),
            accounts=engine.accounts(),
        )

    def labels(self) -> frozenset[str]:
        """Metrics' labels of all registered adapters, with and without their versions."""
        names = (each for name, one in self.registered for each in (name, versioned(name, one.label)))
        return frozenset(map(label, names))
