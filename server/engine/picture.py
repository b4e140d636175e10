"""What the operator's page shows of an engine beside its counters: a snapshot, taken between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...core.requests.request import RequestState
from ...memory.adapters.adapter import Tier
from ...memory.pages.pool import PageKind

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.engine_stats import EngineStats
    from ...memory.adapters.adapter import Adapter
    from ...memory.adapters.store import AdapterStore


class Phase(StrEnum):
    """Phase of a request. PAUSED: it keeps its pages and has no row of the step."""

    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"


class Holding(NamedTuple):
    """Pages and their owner: KV of a tenant's requests for an adapter ("": the base model), or an adapter's weights."""

    kind: PageKind
    adapter: str
    tenant: str
    pages: Sequence[int]


AdapterRow = tuple[str, Tier, int, int, int | None, bool]
"""An adapter: name, tier, rank, pages that it takes where it is resident, requests that it has begun with (None:
unknown), whether it is pinned. A plain tuple: thousands are made a second.
"""


class ReplicaRow(NamedTuple):
    """A replica of a cluster; stats is None before its first report."""

    name: str
    state: str
    stats: EngineStats | None


@dataclass(frozen=True, slots=True)
class Picture:
    """A snapshot. adapters: makes their rows as they are when it is called, on any thread but the engine's.

    phases: number of requests by adapter ("" for the base model), tenant and phase. kinds: a byte for each page; empty
    where the engine is elsewhere. holdings: owners of pages, as far as these have any.
    """

    adapters: Callable[[], list[AdapterRow]] = list
    phases: Counter[tuple[str, str, Phase]] = field(default_factory=Counter)
    kinds: bytes = b""
    holdings: list[Holding] = field(default_factory=list)
    replicas: list[ReplicaRow] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine) -> Picture:
        """To be called on the engine's thread."""
        store, scheduler = engine.store, engine.scheduler
        running, most, only = scheduler.running, engine.config.max_num_seqs, scheduler.only
        seated = set(running[:most] if running.dealt is None else running.dealt)
        phases: Counter[tuple[str, str, Phase]] = Counter()
        holdings: list[Holding] = []
        for request in running:
            adapter = request.adapter_name or ""
            sits = request in seated and (only is None or request.adapter in only)
            phases[adapter, request.tenant, Phase.RUNNING if sits else Phase.PAUSED] += 1
            if request.state is RequestState.RUNNING or request.state is RequestState.LOADING:
                holdings.append(Holding(PageKind.KV, adapter, request.tenant, request.block_table.pages.copy()))
        for request in scheduler.waiting:
            phases[request.adapter_name or "", request.tenant, Phase.WAITING] += 1
        holdings += (Holding(PageKind.ADAPTER, one.name, "", one.pages) for one in store.resident())
        return cls(partial(_rows, store, store.registered()), phases, engine.pool.kinds().tobytes(), holdings)


def _rows(store: AdapterStore, registered: Sequence[tuple[str, Adapter]]) -> list[AdapterRow]:
    """Rows of adapters. It looks at one attribute or entry after another, so that no step has to wait for it."""
    near, tier, is_pinned = store.images.keys(), store.tier, store.is_pinned
    return [
        (one.name, tier(one) if one.pages or one in near else Tier.DISK, one.rank, one.layout.num_pages, one.uses,
         is_pinned(one))
        for _, one in registered
    ]  # fmt: skip
