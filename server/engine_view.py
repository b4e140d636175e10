"""State of the engine that a scrape shows beside its counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..memory.adapters.adapter import Tier

if TYPE_CHECKING:
    from ..core.engine import Engine

MAX_TIER_SERIES = 1000
"""Most adapters that get a series of their own; resident ones come first."""

_SHOWN = (Tier.DEVICE, Tier.LOADING, Tier.HOST)


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter that is not only on disk. load_seconds: how long its latest load took; None while unknown."""

    name: str
    rank: int
    pinned: bool
    load_seconds: float | None

    @classmethod
    def of(cls, engine: Engine, name: str) -> AdapterView:
        adapter = engine.store.get(name)
        return cls(name, adapter.rank, engine.store.is_pinned(adapter), adapter.load_seconds)


@dataclass(frozen=True, slots=True)
class EngineView:
    """A snapshot, taken between two steps.

    names: all adapters that are registered. tiers: adapter → tier of those that are not only on disk. adapters: the
    same ones in detail. tier_counts: how many adapters are in each tier.
    running, waiting: adapters of running and of waiting requests; at most `max_adapters` can run at once.
    num_quarantined: adapters that are not served because something is wrong with them.
    """

    names: frozenset[str] = frozenset()
    tiers: dict[str, str] = field(default_factory=dict)
    adapters: list[AdapterView] = field(default_factory=list)
    tier_counts: dict[str, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    max_adapters: int = 0
    block_tokens: int = 0
    num_quarantined: int = 0

    @classmethod
    def of(cls, engine: Engine) -> EngineView:
        """To be called on the engine's thread."""
        store, config = engine.store, engine.config
        tiers = {name: store.tier(store.get(name)) for name in store.names()}
        counts = Counter(tiers.values())
        shown = [(name, tier) for wanted in _SHOWN for name, tier in tiers.items() if tier is wanted]
        running, waiting = engine.adapter_load()
        return cls(
            names=frozenset(tiers),
            adapters=[AdapterView.of(engine, name) for name, _ in shown[:MAX_TIER_SERIES]],
            block_tokens=engine.block_tokens,
            tiers={name: tier.value for name, tier in shown[:MAX_TIER_SERIES]},
            tier_counts={tier.value: counts[tier] for tier in Tier},
            running=running,
            waiting=waiting,
            max_adapters=config.max_adapters_per_step or config.max_num_seqs,
            num_quarantined=len(engine.quarantine),
        )
