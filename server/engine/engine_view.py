"""What /metrics shows of an engine beside its counters: a snapshot, taken between two steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...memory.adapters.adapter import Tier
from ...memory.adapters.versions import versioned

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.engine_stats import AccountStats

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
    def of(cls, engine: Engine, name: str, tier: Tier) -> AdapterView:
        adapter = engine.store.get(name)
        credit = None if engine.modes is None else engine.modes.credit(adapter)
        return cls(name, tier, adapter.rank, engine.store.is_pinned(adapter), adapter.load_seconds, credit)


@dataclass(frozen=True, slots=True)
class EngineView:
    """A snapshot, taken between two steps.

    names: all registered adapters, with and without their versions. adapters: the ones that are not only on disk, at
    most `MAX_TIER_SERIES`.
    tier_counts: adapters in each tier. num_loadable: how many more adapters of average size fit without an eviction.
    running, waiting: adapters of running and of waiting requests; at most `max_adapters` can run at once.
    num_quarantined: broken adapters, which are not served. accounts: tenants, or adapters, with requests in progress.
    """

    names: frozenset[str] = frozenset()
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
        tiers = {name: store.tier(store.get(name)) for name in store.names()}
        counts = Counter(tiers.values())
        shown = [(name, tier) for wanted in _SHOWN for name, tier in tiers.items() if tier is wanted]
        running, waiting = engine.adapter_load()
        return cls(
            names=frozenset((*tiers, *(versioned(name, store.get(name).label) for name in tiers))),
            adapters=[AdapterView.of(engine, name, tier) for name, tier in shown[:MAX_TIER_SERIES]],
            block_tokens=engine.block_tokens,
            tier_counts={tier.value: counts[tier] for tier in Tier},
            num_loadable=store.num_loadable,
            running=running,
            waiting=waiting,
            max_adapters=config.max_adapters_per_step or config.max_num_seqs,
            num_quarantined=len(engine.adapters.quarantine),
            accounts=engine.accounts(),
        )
