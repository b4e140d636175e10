"""Packing of adapters of many ranks and of KV in one page pool: real pool, store and prefix cache, no tensors.

python -m chorus.perf.bench.allocator [--cycles 10000] [--occupancy 0.95] [--seed 0]

In each cycle a request for a random adapter comes, its adapter is loaded (evicting idle ones if room is short), KV
grows and old requests end, which keeps the pool at the given occupancy. Every refusal is compared with a perfect packer
of pages: one that could use every free or idle page. Waste is the part of allocated pages that is neither weights nor
KV.

Tests: tests/perf/gate/test_gate.py
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.reclaimer import Reclaimer
from ...memory.adapters.store import AdapterStore
from ...memory.host.images import HostImages
from ...memory.pages.block_table import BlockTable
from ...memory.pages.eviction import EvictionOrder, RestoreCosts
from ...memory.pages.pool import PageKind, PagePool
from ...memory.pages.prefix import PrefixCache
from ...memory.pages.shadow import ShadowPages
from ..inline_reads import InlineReads
from ..report.command import conclude, parser
from .models.sizes import SIZES
from .models.weightless import WeightlessAdapters

RANKS = (4, 8, 16, 32, 64)

#: Llama-3.1-8B in bfloat16.
LLAMA, ITEMSIZE, BLOCK_TOKENS = SIZES["llama-3.1-8b"].geometry, 2, 16

#: Seconds between two readings of the clock: loads take the same time in every run, so a seed gives one result.
_TICK = 1e-3


@dataclass
class Outcome:
    """Counts of a run; waste is the mean over all cycles, as a share of allocated bytes."""

    cycles: int
    loads: int = 0
    evictions: int = 0
    refusals: int = 0
    avoidable_refusals: int = 0
    occupancy: float = 0.0
    adapter_waste: float = 0.0
    kv_waste: float = 0.0
    waste: float = 0.0
    seconds: float = 0.0


@dataclass(eq=False)
class Live:
    """A request in progress."""

    adapter: Adapter
    table: BlockTable
    num_tokens: int


class Study:
    """A pool under load."""

    def __init__(self, num_pages: int, num_adapters: int, seed: int) -> None:
        self._page = LLAMA.page_layout(ITEMSIZE, BLOCK_TOKENS)
        self._random = random.Random(seed)
        self._pool = PagePool(num_pages)
        order, costs = EvictionOrder(), RestoreCosts()
        images = HostImages(1 << 40, InlineReads())
        ticks = itertools.count()
        self._store = AdapterStore(
            self._pool,
            WeightlessAdapters(LLAMA.projections, self._page),
            images=images,
            order=order,
            costs=costs,
            page_bytes=self._page.page_bytes,
            clock=lambda: next(ticks) * _TICK,
        )
        self._prefix = PrefixCache(self._pool, order, costs, BLOCK_TOKENS)
        self._reclaimer = Reclaimer(self._pool, order, self._store, self._prefix, ShadowPages(self._pool, order))
        self._live: deque[Live] = deque()
        self._adapters = [
            self._store.register(f"a{i}", Path(f"a{i}-{self._random.choice(RANKS)}")) for i in range(num_adapters)
        ]

    def run(self, cycles: int, occupancy: float) -> Outcome:
        outcome = Outcome(cycles)
        start, samples = time.perf_counter(), []
        for cycle in range(cycles):
            while self._in_use() > occupancy * self._pool.num_usable and self._live:
                self._end(self._random.randrange(len(self._live)))
            self._begin(outcome)
            for live in self._random.sample(self._live, min(8, len(self._live))):
                self._grow(live, self._random.randrange(1, 64), outcome)
            samples.append(self._measure())
            if cycle % 100 == 0:
                self._pool.check_integrity(self._holders())
        while self._live:
            self._end(0)
        self._reclaimer.reclaim_all()
        self._pool.check_integrity(self._holders())
        if self._pool.num_free != self._pool.num_usable:
            raise AssertionError(f"{self._pool.num_usable - self._pool.num_free} pages were lost")
        outcome.loads, outcome.evictions = self._store.num_loads, self._store.num_evictions
        columns = list(zip(*samples[cycles // 10 :], strict=True))  # the first tenth fills the pool
        means = [sum(column) / len(column) for column in columns]
        outcome.occupancy, outcome.adapter_waste, outcome.kv_waste, outcome.waste = means
        outcome.seconds = time.perf_counter() - start
        return outcome

    def _begin(self, outcome: Outcome) -> None:
        """A request for a random adapter arrives with a prompt."""
        adapter = self._random.choice(self._adapters)
        num_tokens = self._random.randrange(16, 2048)
        wanted = self._page.pages_for_tokens(num_tokens) + (0 if adapter.pages else adapter.num_pages)
        if not self._has_room(wanted, adapter, outcome):
            return
        if not adapter.pages:
            self._reclaimer.make_room(adapter.num_pages)
        self._store.hold(adapter)
        self._store.acquire(adapter)
        live = Live(adapter, BlockTable(self._pool, self._prefix, BLOCK_TOKENS), num_tokens)
        self._reclaimer.make_room(live.table.missing_pages(num_tokens))
        live.table.grow(num_tokens)
        self._live.append(live)

    def _grow(self, live: Live, num_tokens: int, outcome: Outcome) -> None:
        wanted = live.table.missing_pages(live.num_tokens + num_tokens)
        if self._has_room(wanted, live.adapter, outcome):
            self._reclaimer.make_room(wanted)
            live.num_tokens += num_tokens
            live.table.grow(live.num_tokens)

    def _has_room(self, wanted: int, adapter: Adapter, outcome: Outcome) -> bool:
        """Pages by the pool's count, compared with a perfect packer's: free plus idle pages."""
        available = self._reclaimer.available
        if adapter.pages and adapter.references == 0:
            available -= len(adapter.pages)
        idle = sum(len(a.pages) for a in self._adapters if a.references == 0 and a is not adapter)
        fits = wanted <= available
        outcome.refusals += not fits
        outcome.avoidable_refusals += not fits and wanted <= self._pool.num_free + idle
        return fits

    def _end(self, index: int) -> None:
        live = self._live[index]
        del self._live[index]
        live.table.free()
        self._store.release(live.adapter)
        self._store.let_go(live.adapter)

    def _in_use(self) -> int:
        return self._pool.num_usable - self._reclaimer.available

    def _measure(self) -> tuple[float, float, float, float]:
        """(occupancy, waste in adapter pages, in KV pages, in all), each a share."""
        page_bytes = self._page.page_bytes
        resident = [adapter for adapter in self._adapters if adapter.pages]
        adapter_bytes = sum(a.manifest.num_params(LLAMA.projections) for a in resident) * ITEMSIZE
        adapter_pages = self._pool.count(PageKind.ADAPTER)
        kv_bytes = sum(live.num_tokens for live in self._live) * LLAMA.kv_elems_per_token * ITEMSIZE
        kv_pages = self._pool.count(PageKind.KV)
        allocated = adapter_pages + kv_pages
        return (
            allocated / self._pool.num_usable,
            1 - adapter_bytes / max(1, adapter_pages * page_bytes),
            1 - kv_bytes / max(1, kv_pages * page_bytes),
            1 - (adapter_bytes + kv_bytes) / max(1, allocated * page_bytes),
        )

    def _holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        yield from self._store.holders()
        for live in self._live:
            yield PageKind.KV, live.table.pages


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--cycles", type=int, default=10_000, help="requests that come")
    add("--occupancy", type=float, default=0.95, help="share of pages in use")
    add("--pages", type=int, default=8192, help="pages of 2 MiB in the arena")
    add("--adapters", type=int, default=500, help="registered adapters")
    add("--seed", type=int, default=0)
    arguments = command.parse_args(argv)
    study = Study(arguments.pages, arguments.adapters, arguments.seed)
    outcome = study.run(arguments.cycles, arguments.occupancy)
    result = vars(outcome)
    for name, value in result.items():
        print(f"{name:20s} {value:.4f}" if isinstance(value, float) else f"{name:20s} {value}")
    return conclude(result, not outcome.avoidable_refusals)


if __name__ == "__main__":
    raise SystemExit(main())
